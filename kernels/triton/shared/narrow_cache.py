"""Owns K and V in 8 bits as a GPU has them: a block holds all of its numbers, and behind them its scales, head by head.
Never rounds a number that is read: scales multiply scores and probabilities, by whoever computes those."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_format import SCALE_BYTES
from kernels.triton.shared.launch import INTERPRETED
from kernels.triton.shared.stored_numbers import E4M3_UNIT, e4m3, from_int8

_SCALE_BYTES = tl.constexpr(SCALE_BYTES)


@cache
def converts_e4m3() -> bool:
    """Return whether the GPU has instructions that convert e4m3: from compute capability 8.9 on."""
    return not INTERPRETED and int(triton.runtime.driver.active.get_current_target().arch) >= 89


def readable(cache: Tensor) -> Tensor:
    """Return K or V of any type as kernels read it: e4m3 as uint8 where no instruction converts it. Before 8.9, Triton
    has no such type, either."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn and not converts_e4m3() else cache


def writable(cache: Tensor) -> Tensor:
    """Return K or V of any type as kernels write it: e4m3 as uint8, since its bits are computed."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def numbers_at(block, offset, kv_head, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return where the numbers of a slot's KV head begin in K or V, in bytes."""
    PLACES: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    return block * (PLACES * (HEAD_DIM + _SCALE_BYTES)) + (offset * NUM_KV_HEADS + kv_head) * HEAD_DIM


@triton.jit
def scale_at(block, offset, kv_head, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return where the scale of a slot's KV head is in K or V, counted in float32. A head's scales of a block are
    beside each other, so that a program reads them in whole sectors."""
    PLACES: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    PER_BLOCK: tl.constexpr = PLACES * (HEAD_DIM + _SCALE_BYTES) // _SCALE_BYTES
    return block * PER_BLOCK + (PLACES * HEAD_DIM // _SCALE_BYTES + kv_head * BLOCK_SIZE) + offset


@triton.jit
def as_scales(cache):
    """Return the pointer to K or V in 8 bits as one to float32 numbers."""
    return cache.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_scales(cache, at, mask):
    """Return what the numbers of `cache` that `widened` returned are to be multiplied by. at: from `scale_at`."""
    scales = tl.load(as_scales(cache) + at, mask=mask, other=0.0)
    return scales * E4M3_UNIT if cache.dtype.element_ty == tl.uint8 else scales


@triton.jit
def widened(numbers, kind: tl.constexpr):
    """Return numbers of a cache in `kind`, before their scales. numbers: as loaded, int8, e4m3, or its bits in uint8;
    kind: float32, bfloat16 or float16, in all of which they are exact."""
    if numbers.dtype == tl.int8:
        wide = from_int8(numbers)
    elif numbers.dtype == tl.uint8:
        wide = e4m3(numbers.to(tl.int16))
    else:
        # By way of float32: from float16 straight to bfloat16 is a conversion at a quarter of the rate.
        wide = numbers.to(tl.float16).to(tl.float32)
    return wide.to(kind)
