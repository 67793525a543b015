"""Owns the product of a few rows with blocks of a weight in their own type, alone or with the gated activation.
Never chooses how many programs share the inputs: kernels.triton.linear.few_rows does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from kernels.triton.shared.launch import dot, tuned
from kernels.triton.shared.overlap import wait_for_previous

# A weight is read once, and shared memory holds what is on its way: more of it in flight beats everything else. The
# last of each list fits in 99 KiB with any tile.
CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": inputs}, num_warps=warps, num_stages=stages)
    for outputs, inputs, warps, stages in (
        *((64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 8, 4), (32, 128, 2, 4)),
        (64, 64, 4, 4),
    )
]
GATED_CONFIGS = [
    triton.Config({"BLOCK_N": outputs, "BLOCK_K": inputs}, num_warps=warps, num_stages=stages)
    for outputs, inputs, warps, stages in ((64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 2, 4), (64, 64, 4, 3))
]
MOST_OUTPUTS: int = max(config.kwargs["BLOCK_N"] for config in CONFIGS + GATED_CONFIGS)
MOST_INPUTS: int = max(config.kwargs["BLOCK_K"] for config in CONFIGS + GATED_CONFIGS)
_KEY = ["INPUTS", "OUTPUTS", "TILE"]


@triton.jit
def load(at, of_outputs, inside, WHOLE: tl.constexpr):
    """A block of a weight, [BLOCK_N, BLOCK_K]. WHOLE: all of it is there."""
    return tl.load(at) if WHOLE else tl.load(at, mask=of_outputs[:, None] & inside[None, :], other=0.0)


@triton.jit
def add_bias(total, bias, n, of_outputs):
    if bias is not None:
        total += tl.load(bias + n, mask=of_outputs, other=0.0).to(tl.float32)[:, None]
    return total


# Sizes are numbers at run time, so that all layers of a model share what is compiled.
@tuned(CONFIGS, _KEY)
@triton.jit(do_not_specialize=["num_rows"])
def few_rows(
    x,
    weight,
    bias,
    out,
    num_rows,
    INPUTS,
    OUTPUTS,
    SPAN,
    WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of TILE rows, over SPAN inputs. x: [num_rows, INPUTS]; weight: [OUTPUTS, INPUTS]; out: [num_rows,
    OUTPUTS], or [splits, num_rows, OUTPUTS] float32 without bias. WHOLE: sizes are multiples of every block."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, split = tl.arange(0, TILE), tl.program_id(1)
    real, of_outputs = row < num_rows, n < OUTPUTS
    from_x, from_weight = x + row[None, :] * INPUTS, weight + n[:, None] * INPUTS
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    wait_for_previous(OVERLAPS)
    for first in tl.range(split * SPAN, tl.minimum(split * SPAN + SPAN, INPUTS), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < INPUTS
        of_weight = load(from_weight + k[None, :], of_outputs, inside, WHOLE)
        of_x = tl.load(from_x + k[:, None], mask=real[None, :] if WHOLE else real[None, :] & inside[:, None], other=0.0)
        total = dot(of_weight, of_x, total)
    total = add_bias(total, bias, n, of_outputs)
    to = out + (split.to(tl.int64) * num_rows + row)[None, :] * OUTPUTS + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[None, :] & of_outputs[:, None])


@tuned(GATED_CONFIGS, _KEY)
@triton.jit(do_not_specialize=["num_rows"])
def few_rows_gated(
    x,
    weight,
    bias,
    out,
    num_rows,
    INPUTS,
    OUTPUTS,
    WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """silu(gate) * up of BLOCK_N outputs. weight: [2 * OUTPUTS, INPUTS], the rows of gate, then those of up; bias:
    [2 * OUTPUTS]; out: [num_rows, OUTPUTS]."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, TILE)
    real, of_outputs = row < num_rows, n < OUTPUTS
    from_x = x + row[None, :] * INPUTS
    from_gate, from_up = weight + n[:, None] * INPUTS, weight + (n + OUTPUTS)[:, None] * INPUTS
    gate, up = tl.zeros([BLOCK_N, TILE], tl.float32), tl.zeros([BLOCK_N, TILE], tl.float32)
    wait_for_previous(OVERLAPS)
    for first in tl.range(0, INPUTS, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < INPUTS
        of_gate = load(from_gate + k[None, :], of_outputs, inside, WHOLE)
        of_up = load(from_up + k[None, :], of_outputs, inside, WHOLE)
        of_x = tl.load(from_x + k[:, None], mask=real[None, :] if WHOLE else real[None, :] & inside[:, None], other=0.0)
        gate, up = dot(of_gate, of_x, gate), dot(of_up, of_x, up)
    # Rounded as if both had been stored.
    kind = out.dtype.element_ty
    gate = add_bias(gate, bias, n, of_outputs).to(kind).to(tl.float32)
    up = add_bias(up, bias, n + OUTPUTS, of_outputs).to(kind).to(tl.float32)
    to = out + row[None, :] * OUTPUTS + n[:, None]
    tl.store(to, (gate * tl.sigmoid(gate) * up).to(kind), mask=real[None, :] & of_outputs[:, None])


@dataclass(frozen=True, slots=True)
class Kernels:
    """The launches of both products, with the options of each launch."""

    few_rows: Any
    few_rows_gated: Any
    options: Mapping[str, Any] = field(default_factory=dict)


TUNED = Kernels(few_rows, few_rows_gated)
"""In the fastest configurations."""
