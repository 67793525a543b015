"""Owns matrix products with weights in the activations' type on a GPU: few rows by a kernel, more by torch's operator.
Never waits for the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels.forward import Linear
from kernels.triton.linear.few_rows_kernels import MOST_INPUTS, MOST_OUTPUTS, TUNED, Kernels
from kernels.triton.linear.multiply import add_splits
from kernels.triton.shared.launch import padded
from kernels.triton.shared.overlap import overlapping, overlaps

TYPES = (torch.bfloat16, torch.float16)
FEW_ROWS, LEAST_TILE = 64, 16
"""The most rows that the kernel takes, all in one tile, so that a weight is read once; and the smallest tile."""
LAUNCH_ROWS = (LEAST_TILE, 2 * LEAST_TILE, FEW_ROWS)
"""A number of rows for each launch that there is."""
PROGRAMS, PROGRAM_OUTPUTS, MOST_SPLITS, LEAST_SPAN = 80, 64, 8, 256
"""A row's inputs are split in two, and again, down to LEAST_SPAN each, while blocks of PROGRAM_OUTPUTS outputs make no
more than PROGRAMS programs: an H100 has 132 multiprocessors. Constants: the order of sums depends on no machine."""
ALIGNED = 16
"""A multiple of so many inputs can be read sixteen bytes at a time; others are left to torch."""
LEAST_OUTPUTS = 16
"""Fewer, such as the gate of a shared expert, are left to torch: a block would be masked nearly whole."""
BLOCK, WARPS = 256, 2
"""Outputs and warps of the programs that add splits up: small ones, because there are few outputs."""


def tile_of(rows: int) -> int:
    """Return the rows of the tile for a product of this many rows."""
    return padded(rows, LEAST_TILE)


def span_of(inputs: int, outputs: int) -> int:
    """Return how many inputs one program adds up. It depends on the shape alone."""
    programs, splits = triton.cdiv(outputs, PROGRAM_OUTPUTS), 1
    while programs * splits <= PROGRAMS and splits < MOST_SPLITS and inputs >= 2 * splits * LEAST_SPAN:
        splits *= 2
    return int(triton.cdiv(triton.cdiv(inputs, splits), MOST_INPUTS) * MOST_INPUTS)


def few_row_linear(x: Tensor, linear: Linear, *, kernels: Kernels = TUNED, out: Tensor | None = None) -> Tensor:
    """x W^T + b. # [num_rows, outputs]

    x: [num_rows, inputs], up to FEW_ROWS, contiguous; linear: its weight is a contiguous tensor of x's type. A row's
    sums have one order for all numbers of rows with the same tile. kernels: TUNED, or what takes their place.
    """
    rows, (outputs, inputs) = len(x), linear.weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    span = span_of(inputs, outputs)
    splits = int(triton.cdiv(inputs, span))
    alone = splits == 1
    to = out if alone else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(outputs, meta["BLOCK_N"]), splits

    sizes = (rows, inputs, outputs, span, is_whole(inputs, outputs), overlaps(), tile_of(rows))
    how = {**overlapping(), **kernels.options}
    kernels.few_rows[grid](x, linear.weight, linear.bias if alone else None, to, *sizes, **how)
    if not alone:
        by_rows = (rows, triton.cdiv(outputs, BLOCK))
        alike = {"num_warps": WARPS, **overlapping()}
        add_splits[by_rows](to, linear.bias, out, rows, outputs, splits, BLOCK, overlaps(), **alike)
    return out


def few_row_gated_linear(x: Tensor, linear: Linear, *, kernels: Kernels = TUNED, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up of [gate | up] = x W^T + b, both rounded to x's type first. # [num_rows, outputs / 2]

    The arguments are those of `few_row_linear`.
    """
    rows, (outputs, inputs) = len(x), linear.weight.shape
    outputs //= 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(outputs, meta["BLOCK_N"]),)

    sizes = (rows, inputs, outputs, is_whole(inputs, outputs), overlaps(), tile_of(rows))
    kernels.few_rows_gated[grid](x, linear.weight, linear.bias, out, *sizes, **overlapping(), **kernels.options)
    return out


def is_whole(inputs: int, outputs: int) -> bool:
    """Whether the sizes are multiples of every block."""
    return inputs % MOST_INPUTS == 0 and outputs % MOST_OUTPUTS == 0


def takes(x: Tensor, linear: Linear) -> bool:
    """Whether the kernels here are to compute this. Rows of padding count: what is captured stays as it is."""
    return bool(
        0 < len(x) <= FEW_ROWS
        and linear.weight.shape[0] >= LEAST_OUTPUTS
        and x.dtype in TYPES
        and x.dtype == linear.weight.dtype
        and x.shape[1] % ALIGNED == 0
        and x.is_contiguous()
        and linear.weight.is_contiguous()
    )


def wide_linear(x: Tensor, linear: Linear) -> Tensor:
    """x W^T + b for any number of rows, with a weight of 16 or 32 bits. # [num_rows, outputs]

    x: [num_rows, inputs]; linear: its weight is a tensor of x's type.
    """
    return few_row_linear(x, linear) if takes(x, linear) else F.linear(x, linear.weight, linear.bias)
