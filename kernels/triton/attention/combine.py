"""Owns the merge of a row's splits, weighted by their log-sum-exp.
Never reads beyond the splits that a row has."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention.kernel import split_size
from kernels.triton.shared.launch import padded

AT_A_TIME = 16


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lengths", "decodes"])  # as attend's
def _combine(
    parts,
    lse,
    lengths,
    decodes,
    out,
    split,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head of one row per program, TILE splits at a time, in order."""
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths + row)
    if (length == 0) | (row >= tl.load(decodes)):
        return
    cell = row * heads + head
    i = tl.arange(0, HEAD_PADDED)
    inside = i < HEAD_DIM
    best = float("-inf")
    mass = 0.0
    total = tl.zeros([HEAD_PADDED], tl.float32)
    count = tl.cdiv(length, split_size(length, split))
    for first in tl.range(0, count, TILE):
        part = first + tl.arange(0, TILE)
        sizes = tl.load(lse + cell * num_splits + part, mask=part < count, other=float("-inf"))
        at = (cell * num_splits + part)[:, None] * HEAD_DIM + i[None, :]
        values = tl.load(parts + at, mask=(part < count)[:, None] & inside[None, :], other=0.0)
        new_best = tl.maximum(best, tl.max(sizes, axis=0))
        finite = tl.where(new_best == float("-inf"), 0.0, new_best)  # -inf: only splits before the window so far
        weights, kept = tl.exp2(sizes - finite), tl.exp2(best - finite)
        mass = mass * kept + tl.sum(weights, axis=0)
        total = total * kept + tl.sum(weights[:, None] * values, axis=0)
        best = new_best
    tl.store(out + cell * HEAD_DIM + i, (total / mass).to(out.dtype.element_ty), mask=inside)


def combine(parts: Tensor, lse: Tensor, lengths: Tensor, decodes: Tensor, split: int, out: Tensor) -> None:
    """Merge the splits into the first `decodes` tokens of `out`, except those whose row has length 0.

    parts: [rows, heads, splits, head_dim] float32; lse: [rows, heads, splits], base 2, -inf where a split saw no key;
    lengths: [rows ...] int32; decodes: [1] int32; split: see split_size; out: [num_tokens, heads, head_dim].
    """
    rows, heads, num_splits, head_dim = parts.shape
    _combine[(rows, heads)](
        parts, lse, lengths, decodes, out, split, num_splits, head_dim, padded(head_dim), AT_A_TIME, num_warps=4
    )
