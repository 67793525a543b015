"""Owns random matrices whose weights have 8 or 4 bits, in the layout that kernels.forward.Linear describes.
Never uses the code that packs or reads them."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.forward import Linear
from tests.kernels.rows import seeded_generator


def narrow_case(
    kind: str,
    outputs: int,
    inputs: int,
    *,
    group: int | None = None,
    zeros: bool = False,
    bias: torch.dtype | None = None,
) -> Linear:
    """Return a random matrix, and a bias if its type is given. kind: int8, fp8 or int4."""
    generator = seeded_generator()
    groups = -(-inputs // (group or inputs))
    if kind == "int4":
        weight = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=generator)
        low, high, unit = 0, 16, 8.0
    elif kind == "int8":
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
        low, high, unit = -128, 128, 128.0
    else:
        wide = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 2, inputs, base=2)
        weight, low, high, unit = (wide * 100).clamp(-448, 448).to(torch.float8_e4m3fn), 0, 1, 448.0
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) / unit
    points = torch.randint(low, high, (outputs, groups), dtype=torch.int8, generator=generator) if zeros else None
    return Linear(
        weight,
        None if bias is None else torch.randn(outputs, generator=generator).to(bias),
        scales.flatten() if group is None else scales,
        points,
        group,
    )


def narrow_experts_case(
    kind: str, experts: int, outputs: int, inputs: int, *, group: int | None = None, zeros: bool = False
) -> Linear:
    """Return a random matrix for each expert, their tensors stacked."""
    own = [narrow_case(kind, outputs, inputs, group=group, zeros=zeros) for _ in range(experts)]
    return Linear(
        torch.stack([linear.weight.view(torch.uint8) for linear in own]).view(own[0].weight.dtype),
        scales=torch.stack([linear.scales for linear in own]) * (inputs / 3) ** -0.5,
        zeros=torch.stack([linear.zeros for linear in own]) if zeros else None,
        group=group,
    )


def shuffled(linear: Linear) -> Linear:
    """Return the matrix with its numbers in a random order of inputs, one for each expert."""
    generator, inputs = seeded_generator(), linear.weight.shape[-1] * (2 if linear.weight.dtype == torch.uint8 else 1)
    stack = linear.weight.shape[:-2]
    orders = [torch.randperm(inputs, generator=generator).int() for _ in range(stack.numel())]
    return replace(linear, order=torch.stack(orders).view(*stack, inputs))
