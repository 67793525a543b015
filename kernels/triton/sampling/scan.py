"""Owns the scan of all logits, with many programs per row: maxima by block and group, and each block's mass.
Never decides anything about a row: that takes all of its blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.numbers import mass_of
from kernels.triton.shared.launch import INTERPRETED
from kernels.triton.shared.order_keys import LEAST_KEY, order_key

# The logits of a block, which one program scans, and of a group, whose largest is kept: tokens that may matter are
# found through their groups. The interpreter is slow for each block, yet its tests must cross several.
BLOCK, GROUP = (256, 16) if INTERPRETED else (2048, 64)
NUM_WARPS = 8


# Slices of two copies, of which each program reads one number: alignment must not choose between compiled kernels.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks"])
def scan_block(
    logits,
    stride,
    temperatures,
    top_ks,
    bests,
    tokens,
    masses,
    peaks,
    vocab,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One block of one row per program. logits: [rows, vocab] of any type; temperatures None: they are all 1.

    bests: [rows, blocks] float32, the largest logit; tokens: [rows, blocks] int32, the lowest token that has it, -1 if
    the block has a NaN; peaks: [rows, groups] float32, each group's largest; masses: [rows, blocks] float64, relative
    to the block's largest, written where top-k does not limit and something is drawn.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.sum((value != value).to(tl.int32), axis=0) > 0
    best = tl.max(value, axis=0)
    cell = row * tl.num_programs(1) + block
    tl.store(bests + cell, best)
    tl.store(tokens + cell, tl.where(broken, -1, tl.min(tl.where(value == best, i, vocab), axis=0)))
    groups = tl.reshape(value, [BLOCK // GROUP, GROUP])
    tl.store(peaks + cell * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), tl.max(groups, axis=1))
    temperature, top_k = 1.0, 0
    if temperatures is not None:
        temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    if (temperature > 0.0) & ((top_k <= 0) | (top_k >= vocab)):
        finite = tl.where(best == float("-inf"), 0.0, best)
        tl.store(masses + cell, tl.sum(mass_of(value, finite, temperature), axis=0))


@triton.jit
def row_of_blocks(bests, tokens, num_blocks, vocab, BLOCKS: tl.constexpr):
    """Return one row's (largest logit, lowest token that has it, whether it is finite and none is NaN)."""
    block = tl.arange(0, BLOCKS)
    best_of = tl.load(bests + block, mask=block < num_blocks, other=float("-inf"))
    token_of = tl.load(tokens + block, mask=block < num_blocks, other=0)
    best = tl.max(best_of, axis=0)
    token = tl.min(tl.where(best_of == best, token_of, vocab), axis=0)
    sound = tl.min(token_of, axis=0) >= 0
    return best, token, sound & (best > float("-inf")) & (best < float("inf"))


@triton.jit
def mass_of_blocks(bests, masses, best, temperature, num_blocks, BLOCKS: tl.constexpr):
    """Return each block's mass relative to the row's largest logit. # [BLOCKS] float64"""
    block = tl.arange(0, BLOCKS)
    best_of = tl.load(bests + block, mask=block < num_blocks, other=float("-inf"))
    within = tl.load(masses + block, mask=best_of > float("-inf"), other=0.0)
    return within * mass_of(best_of, best, temperature)


@triton.jit
def listed_tokens(logits, listed, first, count, vocab, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return (tokens, which of them are real, their logits) of as many groups from `first` on as a block has."""
    n = first + tl.arange(0, BLOCK // GROUP)
    group = tl.load(listed + n, mask=n < count, other=vocab)
    i = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [BLOCK])
    real = i < vocab
    return i, real, tl.load(logits + i, mask=real, other=float("-inf")).to(tl.float32)


@triton.jit
def lowest_peak(peak, real, best, count):
    """Return the key of the count-th largest peak: at least `count` tokens are not below it. LEAST_KEY: there are fewer
    groups.

    peak: [GROUPS] of a row, valid where `real`.
    """
    keys = tl.where(real, order_key(peak), LEAST_KEY)
    low, high = tl.full((), LEAST_KEY, tl.int64), order_key(best).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        few = tl.sum((keys > middle).to(tl.int32), axis=0) < count
        low, high = tl.where(few, low, middle + 1), tl.where(few, middle, high)
    return low


@triton.jit
def list_groups(listed, matters, g):
    """List the groups that matter in `listed`, in order, for `listed_tokens`; return how many there are."""
    tl.store(listed + tl.cumsum(matters.to(tl.int32), axis=0) - 1, g, mask=matters)
    tl.debug_barrier()  # other threads of the program wrote what is read next
    return tl.sum(matters.to(tl.int32), axis=0)


class Scanned(NamedTuple):
    """What `scan_block` wrote, in its order."""

    bests: Tensor
    tokens: Tensor
    masses: Tensor
    peaks: Tensor


def scan_rows(logits: Tensor, temperatures: Tensor | None = None, top_ks: Tensor | None = None) -> Scanned:
    """See `scan_block`. temperatures, top_ks: [rows] each, or neither. logits: [rows, vocab], rows contiguous."""
    (num_rows, vocab), device = logits.shape, logits.device
    num_blocks = triton.cdiv(vocab, BLOCK)
    found = Scanned(
        torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device),
        torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device),
        torch.empty(num_rows, num_blocks, dtype=torch.float64, device=device),
        torch.empty(num_rows, num_blocks * (BLOCK // GROUP), dtype=torch.float32, device=device),
    )
    scan_block[(num_rows, num_blocks)](
        logits, logits.stride(0), temperatures, top_ks, *found, vocab, BLOCK, GROUP, num_warps=NUM_WARPS
    )
    return found
