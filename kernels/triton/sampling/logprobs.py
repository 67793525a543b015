"""Owns log-probabilities on the device: of given tokens, and of the most likely ones.
Never sees bans, temperature or filters: the probabilities are the model's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.sampling.scan import (
    BLOCK,
    GROUP,
    NUM_WARPS,
    list_groups,
    listed_tokens,
    lowest_peak,
    mass_of_blocks,
    row_of_blocks,
    scan_rows,
)
from kernels.triton.shared.launch import padded
from kernels.triton.shared.order_keys import logit_of, order_key


# What varies between steps must not choose between compiled kernels: requests ask for any count, 1 and 16 included.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ids"])
def _logprobs(
    logits,
    stride,
    token_ids,
    block_bests,
    block_tokens,
    block_masses,
    peaks,
    listed,
    own,
    top_ids,
    top,
    vocab,
    num_blocks,
    count,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One row per program, after `scan_block`: the log-sum-exp, then the `count` largest logits, one by one."""
    row = tl.program_id(0).to(tl.int64)
    groups_of = num_blocks * (BLOCK // GROUP)
    logits += row * stride
    block_bests += row * num_blocks
    best, _, sound = row_of_blocks(block_bests, block_tokens + row * num_blocks, num_blocks, vocab, BLOCKS)
    mass = tl.sum(mass_of_blocks(block_bests, block_masses + row * num_blocks, best, 1.0, num_blocks, BLOCKS), axis=0)
    size = tl.where(sound, best.to(tl.float64) + tl.log(mass), float("nan"))
    given = tl.load(logits + tl.load(token_ids + row)).to(tl.float64)
    tl.store(own + row, (given - size).to(tl.float32))
    if count > 0:
        g = tl.arange(0, GROUPS)
        real = g * GROUP < vocab
        peak = tl.load(peaks + row * groups_of + g, mask=real, other=float("-inf"))
        matters = real & (order_key(peak) >= lowest_peak(peak, real, best, count))
        listed += row * groups_of
        num_listed = list_groups(listed, matters, g)
        # Ranks are distinct: the logit's order key above the token id, which counts downwards.
        previous = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for number in tl.range(0, count):
            largest = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
            for first in tl.range(0, num_listed, BLOCK // GROUP):
                i, some, value = listed_tokens(logits, listed, first, num_listed, vocab, BLOCK, GROUP)
                rank = (order_key(value).to(tl.int64) << 32) + (0x7FFFFFFF - i)
                rank = tl.where(some & (rank < previous), rank, -0x7FFFFFFFFFFFFFFF)
                largest = tl.maximum(largest, tl.max(rank, axis=0))
            found = logit_of((largest >> 32).to(tl.int32)).to(tl.float64)
            tl.store(top_ids + row * count + number, 0x7FFFFFFF - (largest & 0x7FFFFFFF))
            tl.store(top + row * count + number, (found - size).to(tl.float32))
            previous = largest


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probabilities of token_ids [rows], ids of the `count` most likely tokens [rows, count], theirs).
    Ties go to the lower id.

    A row without a distribution gets NaN: its logits hold a NaN or +inf, or are all -inf. logits: [rows, vocab] of any
    float type, rows contiguous; token_ids: [rows] int64, in the vocabulary; count: at most the vocabulary's size.
    """
    num_rows, vocab = logits.shape
    own = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(num_rows, count, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    if num_rows:
        found = scan_rows(logits)
        listed = torch.empty_like(found.peaks, dtype=torch.int32)
        num_blocks, num_groups = found.bests.shape[1], found.peaks.shape[1]
        sizes = (vocab, num_blocks, count, BLOCK, GROUP, padded(num_blocks), padded(num_groups))
        _logprobs[(num_rows,)](
            logits, logits.stride(0), token_ids, *found, listed, own, top_ids, top, *sizes, num_warps=NUM_WARPS
        )
    return own, top_ids, top
