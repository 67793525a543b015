"""Owns the sums of a tile of rows times a block of outputs, whose weights have the type of activations, 8 or 4 bits.
Never rounds a weight: a stored number less its zero point is exact in 16 bits, and scales multiply sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.shared.launch import dot
from kernels.triton.shared.pack import FP8, INT8, PLAIN, RUN
from kernels.triton.shared.stored_numbers import COUNTER_VALUE, E4M3_UNIT, e4m3, less_zero

_RUN, _PLAIN, _INT8, _FP8 = tl.constexpr(RUN), tl.constexpr(PLAIN), tl.constexpr(INT8), tl.constexpr(FP8)


@triton.jit
def _zeros(zeros, at, n, inside, KIND: tl.constexpr):
    """Return each output's zero point, as `less_zero` takes it. at: the group's first. # [BLOCK_N, 1] float32"""
    zero = tl.zeros_like(n).to(tl.float32) + (128.0 if KIND == _INT8 else 8.0)
    if zeros is not None:
        zero = tl.load(zeros + at + n, mask=inside, other=0).to(tl.float32) + (128.0 if KIND == _INT8 else 0.0)
    return (zero + COUNTER_VALUE)[:, None]


@triton.jit
def sum_products(
    from_x,
    real,
    words,
    scales,
    zeros,
    n,
    of_outputs,
    begin,
    end,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums of outputs `n` of TILE rows, over the words from `begin` to `end`. # [BLOCK_N, TILE] float32

    from_x: [1, TILE], where rows begin, of which some are `real`; n: [BLOCK_N], of which some are `of_outputs`.
    words, scales, zeros: one matrix of a Packed. GROUP 0: all inputs; GROUP_STEP: Packed.group_step.

    Weights are the left operand: tensor cores take that one from registers, where it is widened.
    """
    BITS: tl.constexpr = 16 // PER_WORD
    BY_PLACE: tl.constexpr = GROUP_STEP > 0 and GROUP_STEP < _RUN * PER_WORD  # a run of words has several groups
    LONGEST: tl.constexpr = BLOCK_K if GROUP == 0 else _RUN if BY_PLACE else GROUP_STEP // PER_WORD
    STEP: tl.constexpr = BLOCK_K if BLOCK_K < LONGEST else LONGEST
    from_words = words + n.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    for first in tl.range(begin, end, STEP):
        j = first + tl.arange(0, STEP)
        stored = tl.load(from_words + j[None, :], mask=of_outputs[:, None] & (j < WIDTH)[None, :], other=0)
        if KIND == _PLAIN:
            a = tl.load(from_x + j[:, None], mask=real[None, :] & (j < INPUTS)[:, None], other=0.0)
            total = dot(stored, a, total)
        else:
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
                part = dot(wide.to(a.dtype), a, part)
                if BY_PLACE or (GROUP > 0 and place == PER_WORD - 1):
                    total += part * tl.load(scales + group * OUTPUTS + n, mask=inside, other=0.0)[:, None]
                    part = tl.zeros([BLOCK_N, TILE], tl.float32)
            if GROUP == 0:
                total = part
    if GROUP == 0 and KIND != _PLAIN:
        total *= tl.load(scales + n, mask=of_outputs, other=0.0)[:, None]
    if KIND == _FP8:
        total *= E4M3_UNIT
    return total
