"""Owns the draw: top-p, min-p, and the first candidate whose cumulative mass exceeds the random number's share.
Never looks at a row that the first pass has settled."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.narrow import keeps
from kernels.triton.numbers import LEAST_KEY, SMALLEST_TEMPERATURE, logit_of, mass_of, order_key, uniform


@triton.jit
def _candidates(logits, kept_logits, whole, i, size):
    """Logits of candidates `i`, -inf behind the last; from the row itself where it was not narrowed."""
    direct = tl.load(logits + i, mask=(i < size) & whole, other=float("-inf")).to(tl.float32)
    kept = tl.load(kept_logits + i, mask=(i < size) & (whole == 0), other=float("-inf"))
    return tl.where(whole, direct, kept)


@triton.jit
def _mass_above(logits, kept_logits, whole, size, key, best, temperature, BLOCK: tl.constexpr):
    masses = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, size, BLOCK):
        value = _candidates(logits, kept_logits, whole, first + tl.arange(0, BLOCK), size)
        masses += tl.where(order_key(value) > key, mass_of(value, best, temperature), 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _top_p_edge(logits, kept_logits, whole, size, target, best, temperature, BLOCK: tl.constexpr):
    """(the smallest key above which there is less mass than `target`, how many with that key are in the nucleus)."""
    low, high = tl.full((), LEAST_KEY, tl.int64), order_key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        few = _mass_above(logits, kept_logits, whole, size, middle, best, temperature, BLOCK) < target
        low, high = tl.where(few, low, middle + 1), tl.where(few, middle, high)
    missing = target - _mass_above(logits, kept_logits, whole, size, low, best, temperature, BLOCK)
    each = mass_of(logit_of(low.to(tl.int32)), best, temperature)  # equal logits have equal mass
    ties = tl.ceil(missing / tl.where(each > 0.0, each, 1.0))
    return low.to(tl.int32), tl.maximum(tl.minimum(ties, 1e9), 1.0).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ps", "min_ps", "seeds", "positions"])  # as narrow's
def draw(
    logits,
    stride,
    temperatures,
    top_ps,
    min_ps,
    seeds,
    positions,
    tokens,
    bests,
    totals,
    sizes,
    kept_ids,
    kept_logits,
    vocab,
    BLOCK: tl.constexpr,
):
    """One row for each program; what `narrow` has left is in its arguments. Writes the row's place in `tokens`."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + row)
    if size == 0:
        return
    whole = size < 0
    size = tl.where(whole, vocab, size)
    logits += row * stride
    kept_logits += row * vocab
    best, top_p, min_p = tl.load(bests + row), tl.load(top_ps + row), tl.load(min_ps + row)
    temperature = tl.maximum(tl.load(temperatures + row), SMALLEST_TEMPERATURE)
    edge, ties = tl.full((), LEAST_KEY, tl.int32), tl.full((), 0, tl.int32)
    if top_p < 1.0:
        target = tl.maximum(top_p * tl.load(totals + row), 1e-300)  # the first is always kept
        edge, ties = _top_p_edge(logits, kept_logits, whole, size, target, best, temperature, BLOCK)

    total, tied = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK):
        value = _candidates(logits, kept_logits, whole, first + tl.arange(0, BLOCK), size)
        kept, tied = keeps(order_key(value), edge, ties, tied)
        mass = mass_of(value, best, temperature)
        total += tl.sum(tl.where(kept & (mass >= min_p), mass, 0.0), axis=0)

    target = uniform(tl.load(seeds + row), tl.load(positions + row)) * total
    before, tied = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    found, last = vocab, tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = _candidates(logits, kept_logits, whole, i, size)
        kept, tied = keeps(order_key(value), edge, ties, tied)
        mass = mass_of(value, best, temperature)
        mass = tl.where(kept & (mass >= min_p), mass, 0.0)
        # Sums of a block differ in the last bits by their order: only a token with mass of its own may be found.
        exceeds = (before + tl.cumsum(mass, axis=0) > target) & (mass > 0.0)
        found = tl.minimum(found, tl.min(tl.where(exceeds, i, vocab), axis=0))
        last = tl.maximum(last, tl.max(tl.where(mass > 0.0, i, 0), axis=0))
        before += tl.sum(mass, axis=0)
    found = tl.where(found < vocab, found, last)
    token = tl.load(kept_ids + row * vocab + found, mask=whole == 0, other=0)
    tl.store(tokens + row, tl.where(whole, found, token).to(tl.int64))
