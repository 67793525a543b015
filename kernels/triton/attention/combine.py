"""Owns the merge of a row's splits, weighted by their log-sum-exp.
Never reads beyond the splits that a row has, and never looks at a row that has one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.merge import merge
from kernels.triton.attention.splits import UNITS, splits_of
from kernels.triton.attention.work import MERGED, PARTIALS
from kernels.triton.shared.launch import NO_FUSION, padded
from kernels.triton.shared.tiles import find_item_row

AT_A_TIME = 16
"""Splits whose sizes are read at once."""
HEADS = 8
"""Heads of a program. With one each, finding the row of a token took as long as all the rest."""


@triton.jit(
    do_not_specialize=["num_rows", "window"],
    do_not_specialize_on_alignment=["begins", "lengths"],  # as attend's
)
def _combine(
    parts,
    lse,
    begins,
    lengths,
    sums,
    out,
    num_rows,
    window,
    split,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """HEADS heads of one token after another per program: the weights of all splits first, TILE at a time, then the sum
    of the splits in order, none of which waits for another. IN_ORDER: one split after the other, as `attend` merges
    units."""
    head, i = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, HEAD_PADDED)
    real = head < NUM_HEADS
    inside = real[:, None] & (i < HEAD_DIM)[None, :]
    merged, partials = sums + MERGED * (num_rows + 1), sums + PARTIALS * (num_rows + 1)
    for item in tl.range(tl.program_id(1), tl.load(merged + num_rows), tl.num_programs(1)):
        row = find_item_row(merged, num_rows, item)
        begin, number = tl.load(begins + row), item - tl.load(merged + row)
        _, splits, skipped = splits_of(tl.load(lengths + row), tl.load(begins + row + 1) - begin, window, split)
        partial = (tl.load(partials + row) + number * splits).to(tl.int64)
        best = tl.full([HEADS], float("-inf"), tl.float32)
        mass = tl.zeros([HEADS], tl.float32)
        total = tl.zeros([HEADS, HEAD_PADDED], tl.float32)
        if IN_ORDER:
            for part in tl.range(skipped, splits, num_stages=3):
                cell = (partial + part) * NUM_HEADS + head
                size = tl.load(lse + cell, mask=real, other=float("-inf"))
                values = tl.load(parts + (cell * HEAD_DIM)[:, None] + i[None, :], mask=inside, other=0.0)
                best, mass, total = merge(best, mass, total, size, values)
        else:
            for first in tl.range(skipped, splits, TILE):
                part = first + tl.arange(0, TILE)
                cell = (partial + part)[:, None] * NUM_HEADS + head[None, :]
                sizes = tl.load(lse + cell, mask=(part < splits)[:, None] & real[None, :], other=float("-inf"))
                new_best = tl.maximum(best, tl.max(sizes, axis=0))
                finite = tl.where(new_best == float("-inf"), 0.0, new_best)  # -inf: only splits without a key so far
                mass = mass * tl.exp2(best - finite) + tl.sum(tl.exp2(sizes - finite[None, :]), axis=0)
                best = new_best
            finite = tl.where(best == float("-inf"), 0.0, best)
            for part in tl.range(skipped, splits, num_stages=3):
                cell = (partial + part) * NUM_HEADS + head
                weights = tl.exp2(tl.load(lse + cell, mask=real, other=float("-inf")) - finite)
                values = tl.load(parts + (cell * HEAD_DIM)[:, None] + i[None, :], mask=inside, other=0.0)
                total += weights[:, None] * values
        to = out + ((begin + number).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + i[None, :]
        divisor = tl.where(real, mass, 1.0)  # heads that a program has too many have no mass
        tl.store(to, (total / divisor[:, None]).to(out.dtype.element_ty), mask=inside)


def combine(
    parts: Tensor,
    lse: Tensor,
    begins: Tensor,
    lengths: Tensor,
    sums: Tensor,
    window: int,
    split: int,
    programs: int,
    out: Tensor,
) -> None:
    """Merge the splits of each token whose row has several into `out`; others are left as they are.

    parts: [partials, heads, head_dim] float32, a row's tokens one after another, with the splits of each in order; lse:
    [partials, heads], base 2, -inf where a split saw no key; begins, lengths, split: see AttentionPlan; sums: see Work;
    window: UNLIMITED if there is none; programs: for every HEADS heads; out: [num_tokens, heads, head_dim].
    """
    _, heads, head_dim = parts.shape
    _combine[(triton.cdiv(heads, HEADS), programs)](
        parts, lse, begins, lengths, sums, out, len(lengths), window, split, heads, head_dim, padded(head_dim), HEADS,
        AT_A_TIME, split == UNITS, num_warps=4, **NO_FUSION if split == UNITS else {},
    )  # fmt: skip
