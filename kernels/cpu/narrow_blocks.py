"""Owns whole blocks of the KV cache in 8 bits, as lower tiers keep them: numbers in the cache's order, and then scales.
Never drifts: a block that was widened has the same 8 bits when it is narrowed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from kernels.kv_format import LARGEST, SCALE_BYTES, stored_size

SMALLEST = 2.0**-110
"""A vector whose scale would be smaller is zeros: no product of scale and number is denormal, in bfloat16 either."""
_PIECE = 1 << 14
"""Numbers that are converted at a time: torch starts its team of threads from twice as many on."""
_MAGIC = 1.5 * 2.0**23
"""From here on, float32 has integers alone."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What a block consists of: keys and values of all layers in turn, each a vector for each head of each token."""

    tensors: int
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    """The cache's: bfloat16 or float32."""
    kept_in: torch.dtype
    """One of kernels.kv_format.LARGEST."""

    @property
    def vectors(self) -> int:
        """How many vectors a tensor has of a block, each with its scale."""
        return self.tokens * self.heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole block in 8 bits: of each tensor, all numbers and then all scales."""
        return self.tensors * self.vectors * stored_size(self.head_dim, self.kept_in)


class NarrowBlocks(Protocol):
    """Converts blocks. Any thread may call it; it starts none, and lets Python run others meanwhile.

    block: one of the cache, in the order of its kernels. # [tensors, bytes] uint8
    row: the same in 8 bits. # [row_bytes] uint8, which may lie anywhere
    """

    form: BlockForm

    def narrow(self, block: Tensor, row: memoryview) -> None: ...

    def widen(self, row: memoryview, block: Tensor) -> None: ...


def largest_scale(kept_in: torch.dtype) -> float:
    """Return the largest scale by which what the largest magnitude becomes is finite in float32."""
    most = torch.tensor(torch.finfo(torch.float32).max)
    scale = most / LARGEST[kept_in]
    fits = bool((scale * LARGEST[kept_in]).isfinite())
    return float(scale if fits else scale.nextafter(torch.tensor(0.0)))


def scales_of(largest: Tensor, kept_in: torch.dtype) -> Tensor:
    """Return the scales of vectors from their largest magnitudes, in float32: those of `narrow_cache`, but for what has
    none. What is widened by a scale has the same again: 127 and 448 are so close below a power of two that the largest
    magnitude comes back to the bit, or close enough.

    Zero: the vector is zeros, or too small. NaN: it has an infinity or a NaN, and all of it is NaN when it comes back.
    """
    scales = (largest / LARGEST[kept_in]).clamp(max=largest_scale(kept_in))
    scales = torch.where(scales >= SMALLEST, scales, 0.0)
    return torch.where(largest.isfinite(), scales, torch.nan)


def narrow_vectors(x: Tensor, kept_in: torch.dtype) -> tuple[Tensor, Tensor]:
    """Narrow vectors. x: [.., head_dim]. # [.., head_dim] int8, the numbers' bits, and [..] float32"""
    wide = x.float()
    scales = scales_of(wide.abs().amax(dim=-1), kept_in)
    some = (scales > 0)[..., None]
    units = torch.where(some, wide / scales[..., None], 0.0)
    numbers = _rounded(units).to(torch.int8) if kept_in == torch.int8 else units.to(kept_in).view(torch.int8)
    return torch.where(some, numbers, 0), scales


def _rounded(units: Tensor) -> Tensor:
    """Round to integers, the even one of two. Not by torch.round, which starts threads for 2,048 numbers."""
    return units + _MAGIC - _MAGIC


def widen_vectors(numbers: Tensor, scales: Tensor, kept_in: torch.dtype, to: torch.dtype) -> Tensor:
    """Undo narrow_vectors but for rounding. # [.., head_dim] in `to`"""
    wide = (numbers.view(kept_in).float() * scales[..., None]).to(to)
    return wide.masked_fill_(scales.isnan()[..., None], torch.nan)  # torch's own conversions have several NaNs


class TorchBlocks:
    """NarrowBlocks of a cache of torch's kernels: vectors lie as [tokens, heads]."""

    def __init__(self, form: BlockForm) -> None:
        self.form = form

    def narrow(self, block: Tensor, row: memoryview) -> None:
        for wide, numbers, scales in self._pieces(block, row):
            narrowed, found = narrow_vectors(wide, self.form.kept_in)
            numbers.copy_(narrowed)
            scales.copy_(found.view(torch.uint8).view(scales.shape))

    def widen(self, row: memoryview, block: Tensor) -> None:
        for wide, numbers, scales in self._pieces(block, row):
            own = scales.contiguous().view(torch.float32).squeeze(-1)
            wide.copy_(widen_vectors(numbers, own, self.form.kept_in, self.form.dtype))

    def _pieces(self, block: Tensor, row: memoryview) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Return parts of a block beside those of its row: vectors in the cache's type, their numbers and their scales.
        # [tensors, vectors, head_dim], [tensors, vectors, head_dim] int8, [tensors, vectors, SCALE_BYTES] uint8"""
        tensors, vectors, size = self.form.tensors, self.form.vectors, self.form.head_dim
        wide = block.view(self.form.dtype).view(tensors, vectors, size)
        parts = torch.frombuffer(row, dtype=torch.uint8).view(tensors, -1)
        numbers = parts[:, : vectors * size].view(torch.int8).view(tensors, vectors, size)
        scales = parts[:, vectors * size :].view(tensors, vectors, SCALE_BYTES)
        whole, part = max(1, _PIECE // (vectors * size)), max(1, _PIECE // size)
        for i, j in product(range(0, tensors, whole), range(0, vectors, part)):
            piece = slice(i, i + whole), slice(j, j + part)
            yield wide[piece], numbers[piece], scales[piece]
