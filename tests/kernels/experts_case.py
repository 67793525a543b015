"""Owns random mixtures of experts for kernel tests, whose router can be made to favour some of them.
Never draws a seed: tests.support.seeds gives each test its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.rows import seeded_generator


class ExpertsCase(NamedTuple):
    """The inputs, in the order in which the operations take them."""

    x: Tensor  # [num_tokens, hidden]
    router: Tensor  # [experts, hidden] float32
    gate_up: Tensor  # [experts, 2 * size, hidden]
    down: Tensor  # [experts, hidden, size]

    def to(self, device: str | torch.device) -> ExpertsCase:
        return ExpertsCase(*(tensor.to(device) for tensor in self))


def experts_case(
    num_tokens: int,
    num_experts: int,
    *,
    hidden: int = 32,
    size: int = 24,
    dtype: torch.dtype = torch.float32,
    favoured: Sequence[int] = (),
) -> ExpertsCase:
    """Draw a case. favoured: the experts that every token prefers; none: any."""
    generator = seeded_generator()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    x, router = torch.randn(num_tokens, hidden, generator=generator), 4 * normal(num_experts, hidden)
    if favoured:
        x[:, 0] = 1.0
        router[:, 0] = 0.0
        router[list(favoured), 0] = 50.0
    gate_up, down = normal(num_experts, 2 * size, hidden), normal(num_experts, hidden, size)
    return ExpertsCase(x.to(dtype), router, gate_up.to(dtype), down.to(dtype))


def exact_case(num_tokens: int, num_experts: int) -> ExpertsCase:
    """Draw a case whose products and sums are all exact in float32, in any order of addition: results are the same to
    the bit on every processor's BLAS, and anything that leaks into them shows.

    Values are small integers. Gates are multiples of 128, of which SiLU is the number itself, or zero.
    """
    generator = seeded_generator()

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    hidden, size = 32, 24
    gate_up = integers(num_experts, 2 * size, hidden)
    gate_up[:, :size] *= 128
    return ExpertsCase(
        integers(num_tokens, hidden), integers(num_experts, hidden), gate_up, integers(num_experts, hidden, size)
    )
