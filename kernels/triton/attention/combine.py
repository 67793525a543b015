"""Owns the merge of a row's splits, weighted by their log-sum-exp.
Never reads beyond the splits that a row has, and never looks at a row that has one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.splits import splits_of
from kernels.triton.attention.work import MERGED, PARTIALS
from kernels.triton.shared.launch import padded
from kernels.triton.shared.tiles import find_item_row

AT_A_TIME = 16


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
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head of one token after another per program, TILE splits at a time, in order."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, HEAD_PADDED)
    inside = i < HEAD_DIM
    merged, partials = sums + MERGED * (num_rows + 1), sums + PARTIALS * (num_rows + 1)
    for item in tl.range(tl.program_id(0), tl.load(merged + num_rows), tl.num_programs(0)):
        row = find_item_row(merged, num_rows, item)
        begin, number = tl.load(begins + row), item - tl.load(merged + row)
        _, splits, skipped = splits_of(tl.load(lengths + row), tl.load(begins + row + 1) - begin, window, split)
        partial = (tl.load(partials + row) + number * splits).to(tl.int64)
        best = float("-inf")
        mass = 0.0
        total = tl.zeros([HEAD_PADDED], tl.float32)
        for first in tl.range(skipped, splits, TILE):
            part = first + tl.arange(0, TILE)
            cell = (partial + part) * heads + head
            sizes = tl.load(lse + cell, mask=part < splits, other=float("-inf"))
            at = cell[:, None] * HEAD_DIM + i[None, :]
            values = tl.load(parts + at, mask=(part < splits)[:, None] & inside[None, :], other=0.0)
            new_best = tl.maximum(best, tl.max(sizes, axis=0))
            finite = tl.where(new_best == float("-inf"), 0.0, new_best)  # -inf: only splits without a key so far
            weights, kept = tl.exp2(sizes - finite), tl.exp2(best - finite)
            mass = mass * kept + tl.sum(weights, axis=0)
            total = total * kept + tl.sum(weights[:, None] * values, axis=0)
            best = new_best
        to = out + ((begin + number).to(tl.int64) * heads + head) * HEAD_DIM + i
        tl.store(to, (total / mass).to(out.dtype.element_ty), mask=inside)


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
    window: UNLIMITED if there is none; programs: for each head; out: [num_tokens, heads, head_dim].
    """
    _, heads, head_dim = parts.shape
    _combine[(programs, heads)](
        parts, lse, begins, lengths, sums, out, len(lengths), window, split, head_dim, padded(head_dim), AT_A_TIME,
        num_warps=4,
    )  # fmt: skip
