"""Owns the RMS norm, alone and with the residual added before it.
Never rounds the residual stream: it is float32 whatever the activations are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.shared.launch import padded, warps
from kernels.triton.shared.overlap import overlapping, overlaps, wait_for_previous


@triton.jit
def _norm(
    x,
    residual,
    weight,
    normed,
    total,
    stride,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row per program. residual, total: None, or [rows, SIZE] float32."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    inside = i < SIZE
    factors = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    value = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * SIZE + i, mask=inside, other=0.0)
    if total is not None:
        tl.store(total + row * SIZE + i, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    value *= scale * factors
    tl.store(normed + row * SIZE + i, value.to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """See kernels.reference.rms_norm. x: [..., size]; weight: [size], which is read while the launch ahead may still
    run; out: of x's shape, contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(rows, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """With sum = x + residual, return (rms_norm(sum) in x's type, sum in float32). residual None: there is none yet.

    x: [..., size], residual: the same in float32; weight: as rms_norm's; out: both results, contiguous. The sum may
    overwrite the residual.
    """
    normed, total = (
        (torch.empty_like(x, dtype=t).contiguous() for t in (x.dtype, torch.float32)) if out is None else out
    )
    residual = None if residual is None else residual.reshape(-1, x.shape[-1])
    _launch(x.reshape(-1, x.shape[-1]), residual, weight, normed, total, eps)
    return normed, total


def _launch(
    rows: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, total: Tensor | None, eps: float
) -> None:
    size = rows.shape[1]
    if len(rows):
        how = {"num_warps": warps(size), **overlapping()}
        sizes = (rows.stride(0), eps, size, padded(size), overlaps())
        _norm[(len(rows),)](rows, residual, weight, normed, total, *sizes, **how)
