"""Owns the convolution before linear attention, over each channel's last tokens, those in a request's state included.
Never touches a row without a slot (-1): such rows pad a step to the size of a captured graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows.device import DeviceStateRows, states_on_device
from kernels.rows.step import StateRows
from kernels.triton.shared.launch import padded, warps
from kernels.triton.shared.tiles import find_row

CHANNELS_AT_A_TIME = 128
TOKENS_AT_A_TIME = 16


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["begins", "lengths", "slots"],  # as attend's
)
def _convolve(
    x,
    weight,
    state,
    out,
    begins,
    lengths,
    slots,
    num_rows,
    token_stride,
    channel_stride,
    lag_stride,
    num_channels,
    KERNEL: tl.constexpr,
    PAST_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TILE tokens of one row, BLOCK channels of each. TILE 1: no row has more. state: [slots, KERNEL - 1, num_channels]

    Only a row's first tile reads and writes its state: if rows have more tiles, TILE is at least KERNEL - 1.
    """
    if TILE == 1:
        row, first = tl.program_id(0), 0
    else:
        row, first_tile = find_row(begins, 0, num_rows, tl.program_id(0), 1, TILE)
        first = (tl.program_id(0) - first_tile) * TILE
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(begins + row).to(tl.int64)
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    if (slot < 0) | (first >= count):
        return
    follows = tl.load(lengths + row) > count
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < num_channels)[None, :]
    past = state + slot * (KERNEL - 1) * num_channels + channel[None, :]
    here = x + begin * token_stride + channel[None, :]
    token = first + tl.arange(0, TILE)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for lag in tl.static_range(KERNEL):
        at = (token - (KERNEL - 1) + lag)[:, None]
        real = (token < count)[:, None] & inside
        value = tl.load(here + at * token_stride, mask=real & (at >= 0), other=0.0).to(tl.float32)
        before = past + (at + KERNEL - 1) * num_channels
        value += tl.load(before, mask=real & (at < 0) & follows, other=0.0).to(tl.float32)
        of_lag = tl.load(weight + channel * channel_stride + lag * lag_stride, mask=channel < num_channels, other=0.0)
        total += value * of_lag.to(tl.float32)[None, :]
    to = out + (begin + token)[:, None] * num_channels + channel[None, :]
    tl.store(to, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=(token < count)[:, None] & inside)

    if first == 0:
        i = tl.arange(0, PAST_PADDED)[:, None]
        newest_at = count - (KERNEL - 1) + i
        keeps = (i < KERNEL - 1) & inside
        kept = tl.load(past + (i + count) * num_channels, mask=keeps & (newest_at < 0) & follows, other=0.0)
        newest = tl.load(here + newest_at * token_stride, mask=keeps & (newest_at >= 0), other=0.0)
        tl.debug_barrier()  # other threads of the program may still be reading what is written now
        tl.store(past + i * num_channels, tl.where(newest_at >= 0, newest, kept), mask=keeps)


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, *, out: Tensor | None = None) -> Tensor:
    """See kernels.reference.causal_conv. x: [num_tokens, channels], with any stride between tokens."""
    there = rows if isinstance(rows, DeviceStateRows) else states_on_device(rows)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    channels, kernel = weight.shape
    # At least as long as the convolution's view of the past: only a row's first tile may read its state.
    tile = 1 if there.max_count == 1 else max(TOKENS_AT_A_TIME, padded(kernel - 1))
    block = min(padded(channels), CHANNELS_AT_A_TIME)
    num_rows = len(there.lengths)
    tiles = num_rows if tile == 1 else len(x) // tile + num_rows
    grid = (tiles, triton.cdiv(channels, block))
    strides = (x.stride(0), *weight.stride())
    numbers = (there.first_tokens, there.lengths, there.index, num_rows)
    shape = (channels, kernel, padded(kernel - 1), tile, block)
    _convolve[grid](x, weight, state, out, *numbers, *strides, *shape, num_warps=warps(tile * block))
    return out
