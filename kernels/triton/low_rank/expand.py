"""Owns the second product of LoRA adapters on a GPU: from an adapter's ranks to outputs, added to what is there.
Never touches a token without an adapter, and no two programs write to the same output."""

from __future__ import annotations

from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor

from kernels.forward import LowRankStack
from kernels.rows.adapter_tokens import TILE, AdapterTokens
from kernels.triton.low_rank.shrink import shrink, tile_of
from kernels.triton.shared.launch import dot

OUTPUTS_AT_A_TIME = 128
WARPS = 8
"""With 4, the addresses of outputs that are not aligned do not fit in the registers."""
MOST_RANKS = 64
"""Ranks of one product within a program."""
MOST_PARTS = 3


@triton.jit
def _outputs_of(tile, SECOND: tl.constexpr, THIRD: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (part, its outputs of this tile, which of them are real). Each part has tiles of its own."""
    of_first = tl.cdiv(SECOND, BLOCK_N)
    of_two = of_first + tl.cdiv(THIRD - SECOND, BLOCK_N)
    part = (tile >= of_first).to(tl.int32) + (tile >= of_two).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, of_first, of_two))
    begin = tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))
    end = tl.where(part == 0, SECOND, tl.where(part == 1, THIRD, OUTPUTS))
    n = begin + (tile - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    return part, n, n < end


# Not tuned: timing it would add the same product again and again.
@triton.jit(do_not_specialize_on_alignment=["order", "tiles"])  # as _shrink
def _expand(
    sums,
    b,
    order,
    tiles,
    y,
    y_stride,
    slot_stride,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N outputs of a tile. sums: [places, SPLITS, PARTS * RANKS]; b: [slots, OUTPUTS, RANKS]"""
    number = tl.program_id(0)
    slot = tl.load(tiles + 3 * number)
    if slot < 0:
        return
    place, real, token = tile_of(order, tiles, number, TILE)
    part, n, inside = _outputs_of(tl.program_id(1), SECOND, THIRD, OUTPUTS, BLOCK_N)
    from_sums = sums + place[:, None] * (SPLITS * PARTS * RANKS) + part * RANKS
    from_b = b + slot * slot_stride + n[None, :] * RANKS
    total = tl.zeros([TILE, BLOCK_N], tl.float32)
    for first in tl.range(0, RANKS, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        shrunk = tl.zeros([TILE, BLOCK_R], tl.float32)
        for split in tl.range(SPLITS):
            shrunk += tl.load(from_sums + split * (PARTS * RANKS) + r[None, :], mask=real[:, None], other=0.0)
        of_b = tl.load(from_b + r[:, None], mask=inside[None, :], other=0.0)
        total = dot(shrunk.to(of_b.dtype), of_b, total)
    to = y + token[:, None] * y_stride + n[None, :]
    mask = real[:, None] & inside[None, :]
    total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(y.dtype.element_ty), mask=mask)


def add_low_rank(
    y: Tensor, x: Tensor, stack: LowRankStack, tokens: AdapterTokens, *, batch_invariant: bool = False
) -> None:
    """y[t] += (x[t] A^T) B^T for each token t with an adapter, in place; see kernels.reference.add_low_rank.

    y: [num_tokens, outputs], x: [num_tokens, inputs] and the stack, all of one type. The inner product is rounded to
    that type, and so is the sum. batch_invariant: the same bits on all GPUs of a kind.

    Raises:
        ValueError: y's rows are not contiguous, or the stack's ranks are no multiple of 16.
    """
    a, b, firsts = stack.a, stack.b, stack.firsts
    (_, outputs, ranks), parts = b.shape, len(firsts)
    if y.stride(-1) != 1 or ranks % 16:
        raise ValueError(f"y has strides {y.stride()} and the stack {ranks} ranks: expected 1 last, and 16, 32, ...")
    assert parts <= MOST_PARTS
    sums = shrink(x, a.flatten(1, 2), tokens, batch_invariant=batch_invariant)
    second, third = (*firsts[1:], *[outputs] * (MOST_PARTS - parts))
    bounds = (0, second, third, outputs)
    blocks = sum(triton.cdiv(end - begin, OUTPUTS_AT_A_TIME) for begin, end in pairwise(bounds))
    block_r = min(ranks & -ranks, MOST_RANKS)  # the largest power of two that divides the ranks
    sizes = (second, third, outputs, parts, ranks, sums.shape[1], TILE, block_r, OUTPUTS_AT_A_TIME)
    strides = (y.stride(0), b.stride(0))
    _expand[(len(tokens.tiles), blocks)](sums, b, tokens.order, tokens.tiles, y, *strides, *sizes, num_warps=WARPS)
