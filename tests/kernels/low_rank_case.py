"""Owns random stacks of LoRA adapters for kernel tests, with tokens of any slots.
Never draws a seed: tests.support.seeds gives each test its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference
from kernels.eager.ops import AddLowRank
from kernels.forward import LowRankStack
from kernels.rows.adapter_tokens import AdapterTokens, count_tiles, pack_tokens
from tests.kernels.rows import seeded_generator


class LowRankCase(NamedTuple):
    y: Tensor  # [num_tokens, outputs]
    x: Tensor  # [num_tokens, inputs]
    stack: LowRankStack
    slots: list[int]
    """Each token's."""

    def want(self) -> Tensor:
        return reference.add_low_rank(self.y, self.x, self.stack, self.slots)

    def run(self, add: AddLowRank, device: str, *, spare_tokens: int = 0, spare_tiles: int = 0) -> Tensor:
        """Return y with what `add` adds. The tokens are rows of one token each, and then padding of NaN."""
        counts = [1] * len(self.slots)
        tiles = count_tiles(self.slots, counts) + spare_tiles
        packed = pack_tokens(self.slots, counts, len(counts) + spare_tokens, tiles).to(device)
        y, x = (torch.cat((z, torch.full((spare_tokens, z.shape[1]), torch.nan, dtype=z.dtype))) for z in self[:2])
        y, stack = y.to(device), LowRankStack(self.stack.a.to(device), self.stack.b.to(device), self.stack.firsts)
        add(y, x.to(device), stack, AdapterTokens.of(packed, len(counts) + spare_tokens))
        assert y[len(counts) :].isnan().all(), "padding was written"
        return y[: len(counts)].cpu()


def low_rank_case(
    slots: Sequence[int],
    *,
    inputs: int = 24,
    parts: Sequence[int] = (20,),
    ranks: int = 16,
    own_rank: int | None = None,
    num_slots: int = 4,
    dtype: torch.dtype = torch.float32,
    whole: bool = False,
) -> LowRankCase:
    """Draw a case. own_rank: that of every adapter, beyond which its ranks are zero. whole: small integers, whose sums
    are exact in float32 in any order. Slots that no token has, and tokens without an adapter, hold NaN in what the
    kernels must not read."""
    generator = seeded_generator()

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randint(-2, 3, shape, generator=generator).float()
        return (drawn if whole else torch.randn(*shape, generator=generator) * scale).to(dtype)

    outputs = sum(parts)
    a = draw(num_slots, len(parts), ranks, inputs, scale=inputs**-0.5)
    b = draw(num_slots, outputs, ranks, scale=(own_rank or ranks) ** -0.5)
    if own_rank is not None:
        a[:, :, own_rank:], b[:, :, own_rank:] = 0, 0
    unused = [slot for slot in range(num_slots) if slot not in slots]
    a[unused], b[unused] = torch.nan, torch.nan
    x, y = draw(len(slots), inputs), draw(len(slots), outputs)
    x[[token for token, slot in enumerate(slots) if slot < 0]] = torch.nan
    firsts = tuple(accumulate(parts[:-1], initial=0))
    return LowRankCase(y, x, LowRankStack(a, b, firsts), list(slots))


def mixed(count: int, num_slots: int = 4) -> list[int]:
    """Return slots in turn, so that no two neighbours have the same, with tokens of none between."""
    return [token % (num_slots + 1) - 1 for token in range(count)]
