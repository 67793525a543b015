"""Owns batch-invariant products with weights in the activations' type: any number of rows, one order of sums.
Never leaves a product to a library, which chooses its order by the number of rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.forward import Linear
from kernels.triton.linear.few_rows import (
    FEW_ROWS,
    LAUNCH_ROWS,
    few_row_gated_linear,
    few_row_linear,
    is_whole,
    span_of,
)
from kernels.triton.linear.few_rows_kernels import Kernels
from kernels.triton.linear.invariant_kernels import (
    FEW_ROWS_OF_16_BITS,
    FEW_ROWS_OF_32_BITS,
    many_rows_of_16_bits,
    many_rows_of_32_bits,
)
from kernels.triton.shared.launch import NO_FUSION
from kernels.triton.shared.overlap import overlapping, overlaps

TILE = 128
"""Rows of a tile where there are more than FEW_ROWS."""
INVARIANT_LAUNCH_ROWS = (*LAUNCH_ROWS, FEW_ROWS + 1)
"""A number of rows for each launch that there is."""


def invariant_linear(x: Tensor, linear: Linear, *, out: Tensor | None = None) -> Tensor:
    """x W^T + b. A row has the same bits beside any others. # [num_rows, outputs]

    x: [num_rows, inputs]; linear: its weight is a contiguous tensor of x's type.
    """
    x, (outputs, inputs), rows = x.contiguous(), linear.weight.shape, len(x)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return out
    if rows <= FEW_ROWS:
        return few_row_linear(x, linear, kernels=_few_rows(x), out=out)
    launch = many_rows_of_32_bits if x.dtype == torch.float32 else many_rows_of_16_bits
    span = span_of(inputs, outputs)
    sizes = (rows, inputs, outputs, span, span < inputs, is_whole(inputs, outputs), overlaps(), TILE)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(outputs, meta["BLOCK_N"]) * triton.cdiv(rows, TILE),)

    launch[grid](x, linear.weight, linear.bias, out, *sizes, **overlapping(), **NO_FUSION)
    return out


def takes_gated(x: Tensor, linear: Linear) -> bool:
    """Whether `invariant_gated_linear` takes these: it sums all inputs up at once, as `invariant_linear` may not."""
    outputs, inputs = linear.weight.shape
    return 0 < len(x) <= FEW_ROWS and span_of(inputs, outputs) >= inputs


def invariant_gated_linear(x: Tensor, linear: Linear) -> Tensor:
    """silu(gate) * up of [gate | up] = x W^T + b, both rounded to x's type first: the bits of the activation after
    `invariant_linear`. # [num_rows, outputs / 2]

    The arguments are those of `invariant_linear`, if `takes_gated` says so.
    """
    return few_row_gated_linear(x.contiguous(), linear, kernels=_few_rows(x))


def _few_rows(x: Tensor) -> Kernels:
    return FEW_ROWS_OF_32_BITS if x.dtype == torch.float32 else FEW_ROWS_OF_16_BITS
