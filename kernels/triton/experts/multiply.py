"""Owns the two products of a tile of one expert's pairs, with weights of 16, 8 or 4 bits, and a token's sum.
Never learns how many pairs an expert has: a tile says which pairs it has, and a program without one ends at once."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.shared.launch import fixed, tuned
from kernels.triton.shared.weights import sum_products

# BLOCK_N counts outputs, of which the first product has half from gates and half from ups, and BLOCK_K words: 64 of
# them are 64, 128 or 256 inputs. The last of each list fits in 99 KiB of shared memory for every kind of weight.
FEW_CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": words}, num_warps=warps, num_stages=stages)
    for outputs, words, warps, stages in ((64, 64, 4, 4), (128, 64, 4, 3), (64, 16, 4, 3))
]
"""Tiles of up to 64 pairs: the expert's weights are what takes time."""
MANY_CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": words}, num_warps=warps, num_stages=stages)
    for outputs, words, warps, stages in ((128, 32, 8, 3), (64, 32, 4, 3), (64, 16, 4, 3))
]
"""Tiles of more pairs with weights of fewer bits, which take registers to widen."""
PLAIN_CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": words}, num_warps=warps, num_stages=stages)
    for outputs, words, warps, stages in ((128, 64, 8, 3), (256, 64, 8, 3), (128, 64, 4, 3), (128, 32, 8, 3))
]
"""Tiles of more pairs with weights in the type of activations: both operands of the tensor cores are shared memory."""
INVARIANT_FEW_CONFIGS, INVARIANT_MANY_CONFIGS = (
    [triton.Config({"BLOCK_N": n, "BLOCK_K": 32}, num_warps=warps, num_stages=stages) for n, warps, stages in sizes]
    for sizes in (((64, 4, 4), (64, 4, 2)), ((128, 8, 3), (64, 4, 3), (64, 4, 2)))
)
"""Those of batch-invariant products. They have one BLOCK_K, which decides the order of sums with fewer bits."""


@triton.jit
def _tile(order, tiles, number, TILE: tl.constexpr):
    """Return a tile's (expert, places of its pairs in the order, which of them are real, pairs)."""
    expert = tl.load(tiles + 3 * number)
    place = tl.load(tiles + 3 * number + 1) + tl.arange(0, TILE)
    real = place < tl.load(tiles + 3 * number + 2)
    return expert.to(tl.int64), place.to(tl.int64), real, tl.load(order + place, mask=real, other=0).to(tl.int64)


@triton.jit
def gate_up(
    x,
    words,
    scales,
    zeros,
    order,
    tiles,
    inner,
    x_stride,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N / 2 columns of a tile's silu(gate) * up. words, scales, zeros: a kernels.triton.shared.pack.Packed of
    [experts, 2 * SIZE, HIDDEN]; inner: [num_pairs, SIZE], in `order`.

    PER_TOKEN 0: x has a row for each place in `order`, instead of one for each token.
    """
    OUTPUTS: tl.constexpr = 2 * SIZE
    HALF: tl.constexpr = BLOCK_N // 2
    GROUPS: tl.constexpr = (HIDDEN + GROUP - 1) // GROUP if GROUP > 0 else 1
    blocks = tl.cdiv(SIZE, HALF)
    number = tl.program_id(0) // blocks
    if tl.load(tiles + 3 * number) < 0:
        return
    expert, place, real, pair = _tile(order, tiles, number, TILE)
    first = tl.program_id(0) % blocks * HALF
    i = tl.arange(0, BLOCK_N)
    of_size = first + i % HALF < SIZE
    n = first + i % HALF + i // HALF * SIZE  # the columns' gates, then their ups
    row = place if PER_TOKEN == 0 else pair // PER_TOKEN
    words += expert * (OUTPUTS * WIDTH)
    if scales is not None:
        scales += expert * (GROUPS * OUTPUTS)
    if zeros is not None:
        zeros += expert * (GROUPS * OUTPUTS)
    total = sum_products(
        x + row[None, :] * x_stride,
        real,
        words,
        scales,
        zeros,
        n,
        of_size,
        0,
        WIDTH,
        HIDDEN,
        OUTPUTS,
        WIDTH,
        GROUP,
        GROUP_STEP,
        KIND,
        PER_WORD,
        TILE,
        BLOCK_N,
        BLOCK_K,
    )
    gate, up = tl.split(tl.permute(tl.reshape(total, [2, HALF, TILE]), (1, 2, 0)))
    column = first + tl.arange(0, HALF)
    to = inner + place[None, :] * SIZE + column[:, None]
    value = (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty)
    tl.store(to, value, mask=real[None, :] & (column < SIZE)[:, None])


@triton.jit
def down(
    inner,
    words,
    scales,
    zeros,
    order,
    tiles,
    shares,
    parts,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of a tile's output, times its pairs' shares. words, scales, zeros: a Packed of [experts, HIDDEN,
    SIZE]; parts: [num_pairs, HIDDEN], by pair."""
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP if GROUP > 0 else 1
    blocks = tl.cdiv(HIDDEN, BLOCK_N)
    number = tl.program_id(0) // blocks
    if tl.load(tiles + 3 * number) < 0:
        return
    expert, place, real, pair = _tile(order, tiles, number, TILE)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    of_hidden = n < HIDDEN
    words += expert * (HIDDEN * WIDTH)
    if scales is not None:
        scales += expert * (GROUPS * HIDDEN)
    if zeros is not None:
        zeros += expert * (GROUPS * HIDDEN)
    total = sum_products(
        inner + place[None, :] * SIZE,
        real,
        words,
        scales,
        zeros,
        n,
        of_hidden,
        0,
        WIDTH,
        SIZE,
        HIDDEN,
        WIDTH,
        GROUP,
        GROUP_STEP,
        KIND,
        PER_WORD,
        TILE,
        BLOCK_N,
        BLOCK_K,
    )
    total *= tl.load(shares + pair, mask=real, other=0.0)[None, :]
    to = parts + pair[None, :] * HIDDEN + n[:, None]
    tl.store(to, total.to(parts.dtype.element_ty), mask=real[None, :] & of_hidden[:, None])


_KEY = ["HIDDEN", "SIZE", "GROUP", "KIND", "TILE"]
_CONFIGS = {"few": FEW_CONFIGS, "many": MANY_CONFIGS, "plain": PLAIN_CONFIGS}
_INVARIANT = {"invariant few": INVARIANT_FEW_CONFIGS, "invariant many": INVARIANT_MANY_CONFIGS}
GATE_UP, DOWN = (
    {
        **{name: tuned(configs, _KEY)(kernel) for name, configs in _CONFIGS.items()},
        **{name: fixed(configs, _KEY)(kernel) for name, configs in _INVARIANT.items()},
    }
    for kernel in (gate_up, down)
)
"""The launches of each product, by the list of configurations among which they choose, or that they take in order."""


@triton.jit
def gather_inputs(
    x,
    order,
    tiles,
    columns,
    out,
    x_stride,
    PER_TOKEN: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK of a tile's inputs, in the order of its expert's weights. columns: [experts, INPUTS] int32; out:
    [num_pairs, INPUTS], in `order`. PER_TOKEN: see gate_up."""
    number = tl.program_id(0)
    if tl.load(tiles + 3 * number) < 0:
        return
    expert, place, real, pair = _tile(order, tiles, number, TILE)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < INPUTS
    column = tl.load(columns + expert * INPUTS + k, mask=inside, other=0)
    mask = real[:, None] & inside[None, :]
    row = place if PER_TOKEN == 0 else pair // PER_TOKEN
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask)
    tl.store(out + place[:, None] * INPUTS + k[None, :], value, mask=mask)


@triton.jit
def add_parts(parts, out, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one token's sum, largest share first. parts: [num_tokens, PER_TOKEN, HIDDEN]"""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        total += tl.load(parts + (token * PER_TOKEN + place) * HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + i, total.to(out.dtype.element_ty), mask=inside)
