"""Owns the product of many rows in the order of sums that few rows have, and the launches of both that nothing times.
Never chooses how many inputs are summed up at once: kernels.triton.linear.few_rows does, by the shape alone."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.linear.few_rows_kernels import Kernels, add_bias, few_rows, few_rows_gated, load
from kernels.triton.shared.launch import NO_FUSION, dot, fixed
from kernels.triton.shared.overlap import wait_for_previous

TILES_AT_A_TIME = 8
"""Tiles of rows whose programs start together: their rows stay in the L2 cache while weights pass by."""
_TILES_AT_A_TIME = tl.constexpr(TILES_AT_A_TIME)


@triton.jit(do_not_specialize=["num_rows"])
def many_rows(
    x,
    weight,
    bias,
    out,
    num_rows,
    INPUTS,
    OUTPUTS,
    SPAN,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of TILE rows. As `few_rows` with `add_splits`, in one program: SPAN inputs are summed up alone,
    and these sums in order. SPLIT: there are several. x: [num_rows, INPUTS]; weight: [OUTPUTS, INPUTS]; out: [num_rows,
    OUTPUTS]; WHOLE: sizes are multiples of every block."""
    tiles, blocks = tl.cdiv(num_rows, TILE), tl.cdiv(OUTPUTS, BLOCK_N)
    begin = tl.program_id(0) // (_TILES_AT_A_TIME * blocks) * _TILES_AT_A_TIME
    beside, number = tl.minimum(tiles - begin, _TILES_AT_A_TIME), tl.program_id(0) % (_TILES_AT_A_TIME * blocks)
    row = (begin + number % beside).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = (number // beside).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, of_outputs = row < num_rows, n < OUTPUTS
    from_x, from_weight = x + row[None, :] * INPUTS, weight + n[:, None] * INPUTS
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    wait_for_previous(OVERLAPS)
    for first_of_span in tl.range(0, INPUTS if SPLIT else 1, SPAN if SPLIT else 1):
        part = tl.zeros([BLOCK_N, TILE], tl.float32)
        end = tl.minimum(first_of_span + SPAN, INPUTS) if SPLIT else INPUTS
        for first in tl.range(first_of_span, end, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            inside = k < INPUTS
            of_weight = load(from_weight + k[None, :], of_outputs, inside, WHOLE)
            of_x = tl.load(
                from_x + k[:, None], mask=real[None, :] if WHOLE else real[None, :] & inside[:, None], other=0.0
            )
            part = dot(of_weight, of_x, part)
        total = total + part if SPLIT else part
    total = add_bias(total, bias, n, of_outputs)
    to = out + row[None, :] * OUTPUTS + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[None, :] & of_outputs[:, None])


def _configs(*sizes: tuple[int, int, int, int]) -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_N": outputs, "BLOCK_K": inputs}, num_warps=warps, num_stages=stages)
        for outputs, inputs, warps, stages in sizes
    ]


# The last of each list fits in 99 KiB of shared memory. Products in float32 are those of threads, which hold what they
# multiply in registers: few inputs at a time.
FEW_CONFIGS = _configs((64, 128, 4, 4), (64, 64, 4, 4))
GATED_CONFIGS = _configs((64, 128, 4, 4), (64, 64, 4, 3))
MANY_CONFIGS = _configs((128, 64, 8, 4), (128, 64, 8, 3))
FLOAT32_CONFIGS = _configs((64, 16, 4, 3))
_KEY = ["INPUTS", "OUTPUTS", "TILE"]

many_rows_of_16_bits = fixed(MANY_CONFIGS, _KEY)(many_rows)
many_rows_of_32_bits = fixed(FLOAT32_CONFIGS, _KEY)(many_rows)


def _few_rows(configs: list[triton.Config], gated: list[triton.Config]) -> Kernels:
    return Kernels(fixed(configs, _KEY)(few_rows.fn), fixed(gated, _KEY)(few_rows_gated.fn), NO_FUSION)


FEW_ROWS_OF_16_BITS = _few_rows(FEW_CONFIGS, GATED_CONFIGS)
FEW_ROWS_OF_32_BITS = _few_rows(FLOAT32_CONFIGS, FLOAT32_CONFIGS)
