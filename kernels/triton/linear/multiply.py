"""Owns the product of a tile of rows with a block of outputs whose weights have 8 or 4 bits.
Never widens a weight in memory: kernels.triton.shared.weights does so in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.shared.launch import fixed, tuned
from kernels.triton.shared.overlap import wait_for_previous
from kernels.triton.shared.weights import sum_products

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
# Batch-invariant products have one BLOCK_K, which decides the order of sums. The last of each fits in 99 KiB.
INVARIANT_FEW_CONFIGS, INVARIANT_MANY_CONFIGS = (
    [triton.Config({"BLOCK_N": n, "BLOCK_K": 32}, num_warps=warps, num_stages=stages) for n, warps, stages in sizes]
    for sizes in (((64, 4, 6), (64, 4, 2)), ((128, 8, 3), (64, 4, 3), (64, 4, 2)))
)
MOST_WORDS = max(config.kwargs["BLOCK_K"] for config in FEW_CONFIGS + MANY_CONFIGS)


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
    SPANS: tl.constexpr,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of TILE rows. words, scales, zeros: a kernels.triton.shared.pack.Packed. SPANS 1: SPAN words;
    out: [num_rows, OUTPUTS], or [splits, num_rows, OUTPUTS] float32 without bias. Else over all words, the sums of each
    SPAN in order, as `add_splits` adds them up."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    real, of_outputs = row < num_rows, n < OUTPUTS
    from_x = x + row[None, :] * INPUTS
    if SPANS == 1:
        total = sum_products(
            from_x, real, words, scales, zeros, n, of_outputs, split * SPAN, tl.minimum(split * SPAN + SPAN, WIDTH),
            INPUTS, OUTPUTS, WIDTH, GROUP, GROUP_STEP, KIND, PER_WORD, TILE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_N, TILE], tl.float32)
        for begin in tl.range(0, WIDTH, SPAN):
            total += sum_products(
                from_x, real, words, scales, zeros, n, of_outputs, begin, tl.minimum(begin + SPAN, WIDTH),
                INPUTS, OUTPUTS, WIDTH, GROUP, GROUP_STEP, KIND, PER_WORD, TILE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + n, mask=of_outputs, other=0.0).to(tl.float32)[:, None]
    to = out + (split.to(tl.int64) * num_rows + row)[None, :] * OUTPUTS + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[None, :] & of_outputs[:, None])


_KEY = ["INPUTS", "OUTPUTS", "GROUP", "KIND", "TILE"]
multiply_few = tuned(FEW_CONFIGS, _KEY)(multiply)
multiply_many = tuned(MANY_CONFIGS, _KEY)(multiply)
multiply_few_invariantly = fixed(INVARIANT_FEW_CONFIGS, _KEY)(multiply)
multiply_many_invariantly = fixed(INVARIANT_MANY_CONFIGS, _KEY)(multiply)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    parts,
    bias,
    out,
    num_rows,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK outputs of one row, its splits added in order. parts: [SPLITS, num_rows, OUTPUTS] float32"""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_outputs = n < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_previous(OVERLAPS)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * OUTPUTS + n, mask=of_outputs, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=of_outputs, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + n, total.to(out.dtype.element_ty), mask=of_outputs)
