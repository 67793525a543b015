"""Owns the product of a tile of rows with a block of outputs whose weights have 8 or 4 bits.
Never rounds a weight: a stored number less its zero point is exact in 16 bits, and scales multiply sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.linear.pack import FP8, INT8, RUN
from kernels.triton.shared.launch import dot, tuned
from kernels.triton.shared.stored_numbers import COUNTER_VALUE, E4M3_UNIT, e4m3, less_zero

# BLOCK_K counts words. A group of 128 inputs has 64 words of 8-bit weights and 32 of 4-bit ones: no step is longer.
# Only those of 16 words fit in 99 KiB of shared memory for every kind of weight with activations in float32.
FEW_CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": words}, num_warps=warps, num_stages=stages)
    for outputs, words, warps, stages in (
        *((64, 64, 4, 4), (64, 64, 4, 6), (64, 32, 4, 6), (64, 128, 4, 3), (128, 64, 4, 3), (128, 32, 4, 4)),
        *((32, 64, 2, 4), (64, 16, 4, 3)),
    )
]
MANY_CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": words}, num_warps=warps, num_stages=stages)
    for outputs, words, warps, stages in (
        (64, 32, 4, 3),
        (64, 32, 8, 4),
        (128, 32, 8, 3),
        (128, 32, 8, 4),
        (64, 16, 4, 3),
    )
]
MOST_WORDS = max(config.kwargs["BLOCK_K"] for config in FEW_CONFIGS + MANY_CONFIGS)

_RUN, _INT8, _FP8 = tl.constexpr(RUN), tl.constexpr(INT8), tl.constexpr(FP8)


@triton.jit
def _zeros(zeros, at, n, inside, KIND: tl.constexpr):
    """Return each output's zero point, as `less_zero` takes it. at: the group's first. # [BLOCK_N, 1] float32"""
    zero = tl.zeros_like(n).to(tl.float32) + (128.0 if KIND == _INT8 else 8.0)
    if zeros is not None:
        zero = tl.load(zeros + at + n, mask=inside, other=0).to(tl.float32) + (128.0 if KIND == _INT8 else 0.0)
    return (zero + COUNTER_VALUE)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    SPAN: tl.constexpr,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of TILE rows, over SPAN words. words: [OUTPUTS, WIDTH] int16, PER_WORD weights in each; scales,
    zeros: [groups, OUTPUTS]; out: [num_rows, OUTPUTS], or [splits, num_rows, OUTPUTS] float32 without bias.

    Weights are the left operand: tensor cores take that one from registers, where it is widened. GROUP 0: all inputs.
    GROUP_STEP: a power of two that divides GROUP.
    """
    BITS: tl.constexpr = 16 // PER_WORD
    BY_PLACE: tl.constexpr = GROUP_STEP > 0 and GROUP_STEP < _RUN * PER_WORD  # a run of words has several groups
    LONGEST: tl.constexpr = BLOCK_K if GROUP == 0 else _RUN if BY_PLACE else GROUP_STEP // PER_WORD
    STEP: tl.constexpr = BLOCK_K if BLOCK_K < LONGEST else LONGEST
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    real, of_outputs = row < num_rows, n < OUTPUTS
    from_x, from_words = x + row[None, :] * INPUTS, words + n.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    for first in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, WIDTH), STEP):
        j = first + tl.arange(0, STEP)
        stored = tl.load(from_words + j[None, :], mask=of_outputs[:, None] & (j < WIDTH)[None, :], other=0)
        part = total if GROUP == 0 else tl.zeros([BLOCK_N, TILE], tl.float32)
        for place in tl.static_range(PER_WORD):
            k = j // _RUN * (_RUN * PER_WORD) + place * _RUN + j % _RUN
            a = tl.load(from_x + k[:, None], mask=real[None, :] & (k < INPUTS)[:, None], other=0.0)
            group = 0 if GROUP == 0 else (first * PER_WORD + (place * _RUN if BY_PLACE else 0)) // GROUP
            inside = of_outputs & (group * GROUP < INPUTS)
            number = (stored >> (place * BITS)) & ((1 << BITS) - 1)
            if KIND == _FP8:
                wide = e4m3(number).to(tl.float32)
            else:
                wide = less_zero(number, _zeros(zeros, group * OUTPUTS, n, inside, KIND))
            part = dot(wide.to(x.dtype.element_ty), a, part)
            if BY_PLACE or (GROUP > 0 and place == PER_WORD - 1):
                total += part * tl.load(scales + group * OUTPUTS + n, mask=inside, other=0.0)[:, None]
                part = tl.zeros([BLOCK_N, TILE], tl.float32)
        if GROUP == 0:
            total = part
    if GROUP == 0:
        total *= tl.load(scales + n, mask=of_outputs, other=0.0)[:, None]
    if KIND == _FP8:
        total *= E4M3_UNIT
    if bias is not None:
        total += tl.load(bias + n, mask=of_outputs, other=0.0).to(tl.float32)[:, None]
    to = out + (split.to(tl.int64) * num_rows + row)[None, :] * OUTPUTS + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[None, :] & of_outputs[:, None])


_KEY = ["INPUTS", "OUTPUTS", "GROUP", "KIND", "TILE"]
multiply_few = tuned(FEW_CONFIGS, _KEY)(multiply)
multiply_many = tuned(MANY_CONFIGS, _KEY)(multiply)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(parts, bias, out, num_rows, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK outputs of one row, its splits added in order. parts: [SPLITS, num_rows, OUTPUTS] float32"""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_outputs = n < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * OUTPUTS + n, mask=of_outputs, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=of_outputs, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + n, total.to(out.dtype.element_ty), mask=of_outputs)
