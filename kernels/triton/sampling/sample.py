"""Owns the sampling of a token from what `filter` left: top-p, min-p, then the first whose cumulative mass exceeds the
random number's share.
Never reads a row that already has its token, and reads only one block of a row that no filter limits."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling.filter import keeps
from kernels.triton.sampling.numbers import SMALLEST_TEMPERATURE, mass_of, uniform
from kernels.triton.sampling.scan import mass_of_blocks
from kernels.triton.shared.order_keys import LEAST_KEY, logit_of, order_key


@triton.jit
def _mass_above(kept, size, key, best, temperature, BLOCK: tl.constexpr):
    masses = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(kept + i, mask=i < size, other=float("-inf"))
        masses += tl.where(order_key(value) > key, mass_of(value, best, temperature), 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _top_p_edge(kept, size, target, best, temperature, BLOCK: tl.constexpr):
    """Return (the smallest key with less mass than `target` above it, how many with that key are in the nucleus)."""
    low, high = tl.full((), LEAST_KEY, tl.int64), order_key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        few = _mass_above(kept, size, middle, best, temperature, BLOCK) < target
        low, high = tl.where(few, low, middle + 1), tl.where(few, middle, high)
    missing = target - _mass_above(kept, size, low, best, temperature, BLOCK)
    each = mass_of(logit_of(low.to(tl.int32)), best, temperature)  # equal logits have equal mass
    ties = tl.ceil(missing / tl.where(each > 0.0, each, 1.0))
    return low.to(tl.int32), tl.maximum(tl.minimum(ties, 1e9), 1.0).to(tl.int32)


@triton.jit
def _exceeding(mass, i, before, target, found, last):
    """Return (first place whose cumulative mass exceeds the target, last with any mass, the mass up to here).

    A block's sums differ in their last bits by the order of addition: only a token with mass of its own may be found.
    """
    exceeds = (before + tl.cumsum(mass, axis=0) > target) & (mass > 0.0)
    found = tl.minimum(found, tl.min(tl.where(exceeds, i, found), axis=0))
    return found, tl.maximum(last, tl.max(tl.where(mass > 0.0, i, 0), axis=0)), before + tl.sum(mass, axis=0)


@triton.jit
def _from_all(
    logits,
    block_bests,
    block_masses,
    share,
    best,
    temperature,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the token at `share` of the whole mass: find its block, then its place in the block."""
    mass = mass_of_blocks(block_bests, block_masses, best, temperature, num_blocks, BLOCKS)
    block, target = tl.arange(0, BLOCKS), share * tl.sum(mass, axis=0)
    found, last, _ = _exceeding(mass, block, 0.0, target, BLOCKS, 0)
    chosen = tl.where(found < BLOCKS, found, last)
    before = tl.sum(tl.where(block < chosen, mass, 0.0), axis=0)
    i = chosen * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    found, last, _ = _exceeding(mass_of(value, best, temperature), i, before, target, vocab, 0)
    return tl.where(found < vocab, found, last)


# For the same reason as in filter_row.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ps", "min_ps", "seeds", "positions"])
def sample_row(
    logits,
    stride,
    temperatures,
    top_ps,
    min_ps,
    seeds,
    positions,
    block_bests,
    block_masses,
    tokens,
    bests,
    totals,
    sizes,
    kept_ids,
    kept_logits,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One row per program. Reads what `filter_row` wrote to the shared arguments, and writes the row's token."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + row)
    if size == 0:
        return
    best, top_p, min_p = tl.load(bests + row), tl.load(top_ps + row), tl.load(min_ps + row)
    temperature = tl.maximum(tl.load(temperatures + row), SMALLEST_TEMPERATURE)
    share = uniform(tl.load(seeds + row), tl.load(positions + row))
    if size < 0:
        bests_of, masses_of = block_bests + row * num_blocks, block_masses + row * num_blocks
        token = _from_all(
            logits + row * stride, bests_of, masses_of, share, best, temperature, vocab, num_blocks, BLOCK, BLOCKS
        )
        tl.store(tokens + row, token.to(tl.int64))
        return
    kept_logits += row * vocab
    edge, ties = tl.full((), LEAST_KEY, tl.int32), tl.full((), 0, tl.int32)
    if top_p < 1.0:
        target = tl.maximum(top_p * tl.load(totals + row), 1e-300)  # the first token is always kept
        edge, ties = _top_p_edge(kept_logits, size, target, best, temperature, BLOCK)

    total, tied = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(kept_logits + i, mask=i < size, other=float("-inf"))
        kept, tied = keeps(order_key(value), edge, ties, tied)
        mass = mass_of(value, best, temperature)
        total += tl.sum(tl.where(kept & (mass >= min_p), mass, 0.0), axis=0)

    target = share * total
    before, tied = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
    found, last = vocab, tl.full((), 0, tl.int32)
    for first in tl.range(0, size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(kept_logits + i, mask=i < size, other=float("-inf"))
        kept, tied = keeps(order_key(value), edge, ties, tied)
        mass = mass_of(value, best, temperature)
        found, last, before = _exceeding(tl.where(kept & (mass >= min_p), mass, 0.0), i, before, target, found, last)
    tl.store(tokens + row, tl.load(kept_ids + row * vocab + tl.where(found < vocab, found, last)).to(tl.int64))
