"""Owns the convolution before linear attention: each channel's last tokens, with what a request's state has of them.
Never touches a row without a slot (-1): such rows pad a step to the size of a captured graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged import DeviceStateRows, states_on_device
from kernels.reference import StateRows
from kernels.triton.launch import padded, warps

CHANNELS_AT_A_TIME = 128
TOKENS_AT_A_TIME = 16


@triton.jit(do_not_specialize_on_alignment=["begins", "lengths", "slots"])  # as attend's
def _convolve(
    x,
    weight,
    state,
    out,
    begins,
    lengths,
    slots,
    token_stride,
    channel_stride,
    lag_stride,
    num_channels,
    KERNEL: tl.constexpr,
    PAST_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK channels of one row, TILE tokens at a time. state: [slots, KERNEL - 1, num_channels]"""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(begins + row).to(tl.int64)
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    if (slot < 0) | (count == 0):
        return
    follows = tl.load(lengths + row) > count
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < num_channels)[None, :]
    past = state + slot * (KERNEL - 1) * num_channels + channel[None, :]
    here = x + begin * token_stride + channel[None, :]
    for first in tl.range(0, count, TILE):
        token = first + tl.arange(0, TILE)
        total = tl.zeros([TILE, BLOCK], tl.float32)
        for lag in tl.static_range(KERNEL):
            at = (token - (KERNEL - 1) + lag)[:, None]
            real = (token < count)[:, None] & inside
            value = tl.load(here + at * token_stride, mask=real & (at >= 0), other=0.0).to(tl.float32)
            before = past + (at + KERNEL - 1) * num_channels
            value += tl.load(before, mask=real & (at < 0) & follows, other=0.0).to(tl.float32)
            of_lag = tl.load(
                weight + channel * channel_stride + lag * lag_stride, mask=channel < num_channels, other=0.0
            )
            total += value * of_lag.to(tl.float32)[None, :]
        to = out + (begin + token)[:, None] * num_channels + channel[None, :]
        tl.store(to, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=(token < count)[:, None] & inside)

    i = tl.arange(0, PAST_PADDED)[:, None]
    at = count - (KERNEL - 1) + i
    real = (i < KERNEL - 1) & inside
    kept = tl.load(past + (i + count) * num_channels, mask=real & (at < 0) & follows, other=0.0)
    newest = tl.load(here + at * token_stride, mask=real & (at >= 0), other=0.0)
    tl.debug_barrier()  # others of the program may still read what is written now
    tl.store(past + i * num_channels, tl.where(at >= 0, newest, kept), mask=real)


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, *, out: Tensor | None = None) -> Tensor:
    """See kernels.reference.causal_conv. x: [num_tokens, channels], of any stride between tokens."""
    there = rows if isinstance(rows, DeviceStateRows) else states_on_device(rows)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    channels, kernel = weight.shape
    tile = 1 if there.max_count == 1 else TOKENS_AT_A_TIME
    block = min(padded(channels), CHANNELS_AT_A_TIME)
    grid = (len(there.lengths), triton.cdiv(channels, block))
    strides = (x.stride(0), *weight.stride())
    numbers = (there.first_tokens, there.lengths, there.index)
    shape = (channels, kernel, padded(kernel - 1), tile, block)
    _convolve[grid](x, weight, state, out, *numbers, *strides, *shape, num_warps=warps(tile * block))
    return out
