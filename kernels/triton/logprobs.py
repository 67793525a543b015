"""Owns log-probabilities on the device: of given tokens, and of the most likely ones.
Never sees bans, temperature or filters: they are the model's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import INTERPRETED
from kernels.triton.numbers import logit_of, order_key

BLOCK = 256 if INTERPRETED else 2048


# What differs between steps must not choose between compiled kernels: requests ask for any count, 1 and 16 too.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ids"])
def _logprobs(logits, stride, token_ids, own, top_ids, top, vocab, count, BLOCK: tl.constexpr):
    """One row for each program: the logarithm of the sum once, then the `count` largest, one after another."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    best, mass = float("-inf"), 0.0
    for first in tl.range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(logits + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
        new_best = tl.maximum(best, tl.max(value, axis=0))
        finite = tl.where(new_best == float("-inf"), 0.0, new_best)
        mass = mass * tl.exp(best - finite) + tl.sum(tl.exp(value - finite), axis=0)
        best = new_best
    token = tl.load(token_ids + row)
    size = tl.log(mass)
    # Without a distribution: inf - inf, or the NaN that is in the sum.
    tl.store(own + row, tl.load(logits + token).to(tl.float32) - best - size)

    # Of which no two are equal: the logit's order above the token id counted downwards.
    previous = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for number in tl.range(0, count):
        largest = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for first in tl.range(0, vocab, BLOCK):
            i = first + tl.arange(0, BLOCK)
            value = tl.load(logits + i, mask=i < vocab, other=0.0).to(tl.float32)
            rank = (order_key(value).to(tl.int64) << 32) + (0x7FFFFFFF - i)
            rank = tl.where((i < vocab) & (rank < previous), rank, -0x7FFFFFFFFFFFFFFF)
            largest = tl.maximum(largest, tl.max(rank, axis=0))
        tl.store(top_ids + row * count + number, 0x7FFFFFFF - (largest & 0x7FFFFFFF))
        tl.store(top + row * count + number, logit_of((largest >> 32).to(tl.int32)) - best - size)
        previous = largest


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities of token_ids [rows], ids of the `count` most likely [rows, count], theirs). Ties: lower id.

    NaN for a row that has no distribution: its logits hold a NaN or +inf, or are all -inf. logits: [rows, vocab] of any
    float type, rows contiguous; token_ids: [rows] int64, of the vocabulary; count: at most the vocabulary.
    """
    num_rows, vocab = logits.shape
    own = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(num_rows, count, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    if num_rows:
        _logprobs[(num_rows,)](logits, logits.stride(0), token_ids, own, top_ids, top, vocab, count, BLOCK, num_warps=8)
    return own, top_ids, top
