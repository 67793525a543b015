"""Owns the candidates of a row's draw: its most likely token, and the tokens that top-k, top-p and min-p can leave.
Never leaves out a token that may be drawn, and never assumes that logits form a distribution."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling.numbers import mass_of
from kernels.triton.sampling.scan import list_groups, listed_tokens, lowest_peak, mass_of_blocks, row_of_blocks
from kernels.triton.shared.order_keys import LEAST_KEY, order_key


@triton.jit
def _count_above(logits, listed, count, vocab, key, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    above = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, count, BLOCK // GROUP):
        _, real, value = listed_tokens(logits, listed, first, count, vocab, BLOCK, GROUP)
        above += (real & (order_key(value) > key)).to(tl.int32)
    return tl.sum(above, axis=0)


@triton.jit
def _top_k_edge(logits, listed, count, vocab, least, best, top_k, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return (key of the top_k-th largest logit, how many with that key are in the top k), by bisection of the keys.

    least: at most that key.
    """
    low, high = least, order_key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        few = _count_above(logits, listed, count, vocab, middle, BLOCK, GROUP) < top_k
        low, high = tl.where(few, low, middle + 1), tl.where(few, middle, high)
    return low.to(tl.int32), (top_k - _count_above(logits, listed, count, vocab, low, BLOCK, GROUP)).to(tl.int32)


@triton.jit
def keeps(keys, edge, ties, tied):
    """Return (which of a block are kept, how many are at the edge up to its end). Keep all above the edge, and the
    first `ties` at it.

    tied: how many were at the edge before the block.
    """
    at_edge = (keys == edge).to(tl.int32)
    before = tied + tl.cumsum(at_edge, axis=0) - at_edge
    return (keys > edge) | ((at_edge != 0) & (before < ties)), tied + tl.sum(at_edge, axis=0)


# Slices of two copies, of which each program reads one number: alignment must not choose between compiled kernels.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"])
def filter_row(
    logits,
    stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    block_bests,
    block_tokens,
    block_masses,
    peaks,
    listed,
    tokens,
    bests,
    totals,
    sizes,
    kept_ids,
    kept_logits,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One row per program, after `scan_block`. tokens: the most likely, or -1 for a row without a distribution.

    sizes: how many candidates are in kept_ids and kept_logits, in vocabulary order; 0: nothing is drawn; -1: drawn from
    the whole vocabulary, and nothing is kept. bests: [rows] float32; totals: [rows] float64, the mass before top-p,
    where top-p limits. listed: [rows, groups] int32, scratch. BLOCKS, GROUPS: at least as many as there are.
    """
    row = tl.program_id(0).to(tl.int64)
    groups_of = num_blocks * (BLOCK // GROUP)
    logits += row * stride
    block_bests += row * num_blocks
    block_masses += row * num_blocks
    listed += row * groups_of
    best, token, sound = row_of_blocks(block_bests, block_tokens + row * num_blocks, num_blocks, vocab, BLOCKS)
    tl.store(tokens + row, tl.where(sound, token, -1).to(tl.int64))
    tl.store(bests + row, best)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    drawn = sound & (temperature > 0.0)
    if drawn & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        g = tl.arange(0, GROUPS)
        real_group = g * GROUP < vocab
        peak = tl.load(peaks + row * groups_of + g, mask=real_group, other=float("-inf"))
        lowest, least, total = (
            tl.full((), LEAST_KEY, tl.int64),
            tl.full((), 0.0, tl.float64),
            tl.full((), 0.0, tl.float64),
        )
        if has_top_k:
            lowest = lowest_peak(peak, real_group, best, top_k)
        else:
            total = tl.sum(mass_of_blocks(block_bests, block_masses, best, temperature, num_blocks, BLOCKS), axis=0)
            # A token with less than (1 - top_p) / vocab of the mass is not in the nucleus: it and all smaller ones have
            # less than the nucleus leaves out. The bound is halved, so that rounding cannot matter.
            least = tl.maximum(tl.maximum(1.0 - top_p, 0.0) * total / (2 * vocab), min_p)
        matters = real_group & (order_key(peak) >= lowest) & (mass_of(peak, best, temperature) >= least)
        count = list_groups(listed, matters, g)
        edge, ties = tl.full((), LEAST_KEY, tl.int32), tl.full((), 0, tl.int32)
        if has_top_k:
            edge, ties = _top_k_edge(logits, listed, count, vocab, lowest, best, top_k, BLOCK, GROUP)
        size, tied = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for first in tl.range(0, count, BLOCK // GROUP):
            i, real, value = listed_tokens(logits, listed, first, count, vocab, BLOCK, GROUP)
            mass = mass_of(value, best, temperature)
            kept, tied = keeps(tl.where(real, order_key(value), LEAST_KEY), edge, ties, tied)
            kept = kept & real & (mass >= least)
            total += tl.sum(tl.where(kept & has_top_k, mass, 0.0), axis=0)
            to = row * vocab + size + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(kept_ids + to, i, mask=kept)
            tl.store(kept_logits + to, value, mask=kept)
            size += tl.sum(kept.to(tl.int32), axis=0)
        tl.store(totals + row, total)
        tl.store(sizes + row, size)
    else:
        tl.store(sizes + row, tl.where(drawn, -1, 0))
