"""Owns products of fp8 by fp8 on a GPU: activations are rounded with a scale for each row, weights are as kept.
Never changes the order of weights: activations are written in theirs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forward import Linear
from kernels.triton.shared.launch import dot, tuned
from kernels.triton.shared.pack import FP8, RUN, Packed

FP8_FROM = (8, 9)
"""The compute capability from which tensor cores multiply e4m3."""
TILE = 128
"""Rows of a tile."""
BLOCK = 1024
LARGEST = 448.0
"""The largest number of e4m3."""
_BYTES = 2 * RUN
"""Inputs of a run of words; a group of inputs has whole runs."""
_RUN, _LARGEST = tl.constexpr(RUN), tl.constexpr(LARGEST)
_COUNTER = tl.constexpr(8388608.0)
"""2**23 in float32, whose lowest bits count ones."""
_TINY = tl.constexpr(1e-30)
"""In place of a row's largest magnitude where that is 0."""

# BLOCK_K counts inputs. Tensor cores of compute capability 9.0 add products of fp8 in fewer bits than float32: no sum
# of more inputs is theirs alone.
CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": inputs}, num_warps=warps, num_stages=stages)
    for outputs, inputs, warps, stages in ((128, 128, 8, 3), (64, 128, 4, 3), (128, 64, 8, 3))
]


@triton.jit
def _to_e4m3(value):
    """Return the bits of the nearest numbers of e4m3, of two as near the even one. What is beyond LARGEST becomes that.
    The interpreter's own conversion loses carries. value: float32. # uint8"""
    magnitude = tl.abs(value)
    magnitude = tl.where(magnitude > _LARGEST, _LARGEST, magnitude)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (127 - 7 << 3)
    tiny = (magnitude * 512.0 + _COUNTER).to(tl.int32, bitcast=True) & 15  # multiples of 2**-9, counted
    number = tl.where(magnitude < 0.015625, tiny, normal)
    number = tl.where(value == value, number, 0x7F)
    return (number | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_rows(
    x, input_scale, rounded, scales, x_stride, INPUTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Round one row to e4m3. input_scale: [1] float32, 0: the row's largest magnitude / 448. rounded: [num_rows,
    WIDTH] uint8, in the order in which a Packed has its inputs, and 0 beyond INPUTS; scales: [num_rows] float32."""
    row = tl.program_id(0).to(tl.int64)
    largest, nan = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, INPUTS, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + i, mask=i < INPUTS, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        nan += tl.where(value == value, 0.0, value)
    own = tl.maximum(tl.max(largest, axis=0), _TINY) / _LARGEST
    given = tl.load(input_scale)
    scale = tl.where(given > 0.0, given, own)
    tl.store(scales + row, scale + tl.sum(nan, axis=0))  # one that is no number makes the row none
    for first in tl.range(0, WIDTH, BLOCK):
        i = first + tl.arange(0, BLOCK)
        k = i // (2 * _RUN) * (2 * _RUN) + i % 2 * _RUN + i % (2 * _RUN) // 2
        value = tl.load(x + row * x_stride + k, mask=k < INPUTS, other=0.0).to(tl.float32) / scale
        tl.store(rounded + row * WIDTH + i, _to_e4m3(value), mask=i < WIDTH)


@tuned(CONFIGS, key=["WIDTH", "OUTPUTS", "GROUP"])
@triton.jit(do_not_specialize=["num_rows"])
def multiply_fp8(
    rounded,
    row_scales,
    numbers,
    scales,
    bias,
    out,
    num_rows,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of TILE rows. rounded: [num_rows, WIDTH], numbers: [OUTPUTS, WIDTH], both e4m3; row_scales:
    [num_rows]; scales: [groups, OUTPUTS]. GROUP 0: all inputs; GROUP_STEP: a power of two that divides GROUP."""
    STEP: tl.constexpr = BLOCK_K if GROUP == 0 or BLOCK_K < GROUP_STEP else GROUP_STEP
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, of_outputs = row < num_rows, n < OUTPUTS
    from_rows, from_numbers = rounded + row[None, :] * WIDTH, numbers + n.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    for first in tl.range(0, WIDTH, STEP):
        k = first + tl.arange(0, STEP)
        inside = k < WIDTH
        weight = tl.load(from_numbers + k[None, :], mask=of_outputs[:, None] & inside[None, :], other=0.0)
        a = tl.load(from_rows + k[:, None], mask=real[None, :] & inside[:, None], other=0.0)
        part = dot(weight, a, tl.zeros([BLOCK_N, TILE], tl.float32))
        if GROUP > 0:
            part *= tl.load(scales + first // GROUP * OUTPUTS + n, mask=of_outputs, other=0.0)[:, None]
        total += part
    if GROUP == 0:
        total *= tl.load(scales + n, mask=of_outputs, other=0.0)[:, None]
    total *= tl.load(row_scales + row, mask=real, other=0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + n, mask=of_outputs, other=0.0).to(tl.float32)[:, None]
    to = out + row[None, :] * OUTPUTS + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[None, :] & of_outputs[:, None])


def multiplies_fp8(packed: Packed) -> bool:
    """Whether a weight has a layout that is multiplied by rounded activations."""
    return packed.kind == FP8 and packed.group % _BYTES == 0


def fp8_linear(x: Tensor, linear: Linear, out: Tensor) -> None:
    """x W^T + b for rounded x, see kernels.reference.fp8_linear, into `out` [num_rows, outputs].

    x: [num_rows, inputs], with any stride between rows; linear: its weight is a Packed that `multiplies_fp8`, and it
    has an input_scale.
    """
    packed: Packed = linear.weight
    numbers = packed.words.view(torch.float8_e4m3fn)
    rows, (outputs, width) = len(x), numbers.shape
    rounded = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    row_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    places = rounded.view(torch.uint8)
    round_rows[(rows,)](x, linear.input_scale, places, row_scales, x.stride(0), packed.inputs, width, BLOCK)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, TILE), triton.cdiv(outputs, meta["BLOCK_N"])

    sizes = (outputs, width, packed.group, packed.group_step, TILE)
    multiply_fp8[grid](rounded, row_scales, numbers, packed.scales, linear.bias, out, rows, *sizes)
