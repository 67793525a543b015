"""Owns the first pass over a row's logits: its most likely token, and which tokens top-k and top-p can leave.
Never leaves out a token that may be drawn, and never counts on logits that are no distribution."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.numbers import LEAST_KEY, mass_of, order_key


@triton.jit
def most_likely(logits, vocab, BLOCK: tl.constexpr):
    """(largest logit, the lowest token that has it, whether it is finite and none is NaN). logits: of one row"""
    best, token, broken = float("-inf"), 0, 0
    for first in tl.range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        broken += tl.sum((value != value).to(tl.int32), axis=0)
        largest = tl.max(value, axis=0)
        where = tl.min(tl.where(value == largest, i, vocab), axis=0)
        token = tl.where(largest > best, where, token)
        best = tl.maximum(best, largest)
    return best, token, (broken == 0) & (best > float("-inf")) & (best < float("inf"))


@triton.jit
def _count_above(logits, vocab, key, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        keys = order_key(tl.load(logits + i, mask=i < vocab, other=0.0).to(tl.float32))
        count += ((keys > key) & (i < vocab)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _top_k_edge(logits, vocab, best, top_k, BLOCK: tl.constexpr):
    """(key of the top_k-th largest logit, how many of those with that key belong to them), by bisection of the keys."""
    low, high = tl.full((), LEAST_KEY, tl.int64), order_key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        few = _count_above(logits, vocab, middle, BLOCK) < top_k
        low, high = tl.where(few, low, middle + 1), tl.where(few, middle, high)
    return low.to(tl.int32), (top_k - _count_above(logits, vocab, low, BLOCK)).to(tl.int32)


@triton.jit
def keeps(keys, edge, ties, tied):
    """(which of a block are kept, how many at the edge up to its end): all above the edge, the first `ties` at it.

    tied: how many at the edge there were before the block.
    """
    at_edge = (keys == edge).to(tl.int32)
    before = tied + tl.cumsum(at_edge, axis=0) - at_edge
    return (keys > edge) | ((at_edge != 0) & (before < ties)), tied + tl.sum(at_edge, axis=0)


# Parts of two copies, one number of each read: whether they are aligned must not choose between compiled kernels.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps"])
def narrow(
    logits,
    stride,
    temperatures,
    top_ks,
    top_ps,
    tokens,
    bests,
    totals,
    sizes,
    kept_ids,
    kept_logits,
    vocab,
    BLOCK: tl.constexpr,
):
    """One row for each program. tokens: the most likely, or -1 for a row without a distribution.

    sizes: how many candidates are in kept_ids and kept_logits, in vocabulary order; 0: nothing is to be drawn; -1: the
    whole vocabulary is, and nothing is kept. bests: [rows] float32; totals: [rows] float64, the mass before top-p,
    where that limits.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    best, token, sound = most_likely(logits, vocab, BLOCK)
    tl.store(tokens + row, tl.where(sound, token, -1).to(tl.int64))
    tl.store(bests + row, best)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    drawn = sound & (temperature > 0.0)
    if drawn & (has_top_k | (top_p < 1.0)):
        edge, ties = tl.full((), LEAST_KEY, tl.int32), tl.full((), 0, tl.int32)
        total, least = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        if has_top_k:
            edge, ties = _top_k_edge(logits, vocab, best, top_k, BLOCK)
        else:
            masses = tl.zeros([BLOCK], tl.float64)
            for first in tl.range(0, vocab, BLOCK):
                i = first + tl.arange(0, BLOCK)
                value = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
                masses += mass_of(value, best, temperature)
            total = tl.sum(masses, axis=0)
            # A token with less than (1 - top_p) / vocab of the mass is not in the nucleus: from it on, all have less
            # than what the nucleus leaves out. Half of that, so that rounding cannot matter.
            least = (1.0 - top_p) * total / (2 * vocab)
        size, tied = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for first in tl.range(0, vocab, BLOCK):
            i = first + tl.arange(0, BLOCK)
            value = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
            mass = mass_of(value, best, temperature)
            kept, tied = keeps(order_key(value), edge, ties, tied)
            kept = kept & (mass >= least) & (i < vocab)
            total += tl.sum(tl.where(kept & has_top_k, mass, 0.0), axis=0)
            to = row * vocab + size + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(kept_ids + to, i, mask=kept)
            tl.store(kept_logits + to, value, mask=kept)
            size += tl.sum(kept.to(tl.int32), axis=0)
        tl.store(totals + row, total)
        tl.store(sizes + row, size)
    else:
        tl.store(sizes + row, tl.where(drawn, -1, 0))
