"""Owns matrix products with weights of 8 and 4 bits on a GPU: which launch a number of rows takes, and its splits.
Never widens a weight in memory, and never waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.forward import Linear
from kernels.triton.linear.fp8 import fp8_linear, multiplies_fp8
from kernels.triton.linear.multiply import (
    MOST_WORDS,
    add_splits,
    multiply_few,
    multiply_few_invariantly,
    multiply_many,
    multiply_many_invariantly,
)
from kernels.triton.shared.launch import NO_FUSION
from kernels.triton.shared.pack import Packed

FEW_ROWS, SOME_ROWS, MANY_ROWS = 16, 64, 128
"""Rows of a tile. A step of up to SOME_ROWS has one tile, so that its weights are read once."""
LAUNCH_ROWS = (1, FEW_ROWS + 1, SOME_ROWS + 1)
"""A number of rows for each launch that there is."""
PROGRAMS, PROGRAM_OUTPUTS = 264, 64
"""What a launch of one tile is split for: two programs on each multiprocessor of an H100, with so many outputs each.
Constants, so that the order of sums depends on no machine."""
BLOCK = 1024


def tile_of(rows: int) -> int:
    """Return the rows of a tile for a product of this many rows."""
    return FEW_ROWS if rows <= FEW_ROWS else SOME_ROWS if rows <= SOME_ROWS else MANY_ROWS


def span_of(rows: int, packed: Packed) -> int:
    """Return how many words one program adds up. It depends on the launch, never on the number of rows in it."""
    outputs, width = packed.words.shape
    if rows > SOME_ROWS:
        return width
    wanted = -(-PROGRAMS // triton.cdiv(outputs, PROGRAM_OUTPUTS))
    unit = math.lcm(MOST_WORDS * packed.per_word, packed.group or 1) // packed.per_word
    return int(triton.cdiv(triton.cdiv(width, wanted), unit) * unit)


def narrow_linear(x: Tensor, linear: Linear, *, batch_invariant: bool = False, out: Tensor | None = None) -> Tensor:
    """x W^T + b, the weights widened in registers. # [num_tokens, outputs]

    x: [num_tokens, inputs]; linear: its weight is a Packed. A row's sums have one order for all numbers of rows with
    the same tile. batch_invariant: for all numbers of rows. More than SOME_ROWS are rounded to fp8 where `linear` has
    an input_scale, which is never batch-invariant.
    """
    packed: Packed = linear.weight
    rows, (outputs, width) = len(x), packed.words.shape
    assert x.shape[1] == packed.inputs
    # Out of order, inputs would be read two bytes at a time, once for each block of outputs.
    x = x.contiguous() if linear.order is None else x.index_select(1, linear.order)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return out
    if linear.input_scale is not None and rows > SOME_ROWS and multiplies_fp8(packed):
        fp8_linear(x, linear, out)
        return out
    tile, span = tile_of(rows), span_of(min(rows, SOME_ROWS) if batch_invariant else rows, packed)
    splits, spans = int(triton.cdiv(width, span)), 1
    if batch_invariant and rows > SOME_ROWS:
        splits, spans = 1, splits
    alone = splits == 1
    to = out if alone else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(rows, tile), triton.cdiv(outputs, meta["BLOCK_N"]), splits

    group = packed.group
    sizes = (packed.inputs, outputs, width, group, packed.group_step, span, spans, packed.kind, packed.per_word, tile)
    launch, how = _launch(tile, batch_invariant)
    launch[grid](x, packed.words, packed.scales, packed.zeros, linear.bias if alone else None, to, rows, *sizes, **how)
    if not alone:
        add_splits[(rows, triton.cdiv(outputs, BLOCK))](to, linear.bias, out, rows, outputs, splits, BLOCK, False)
    return out


def _launch(tile: int, batch_invariant: bool) -> tuple[Any, dict[str, Any]]:
    few = tile <= SOME_ROWS
    if batch_invariant:
        return multiply_few_invariantly if few else multiply_many_invariantly, NO_FUSION
    return multiply_few if few else multiply_many, {}
