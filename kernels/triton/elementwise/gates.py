"""Owns the gates on the outputs of attention, linear attention and a shared expert, and a per-head norm.
Never multiplies matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.shared.launch import padded, warps

BLOCK = 1024


@triton.jit
def _gated_norm(x, gate, weight, out, gate_stride, size, eps, HEADS: tl.constexpr, PADDED: tl.constexpr):
    """One head of one token per program."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PADDED)
    inside = i < size
    at = (token * HEADS + head) * size + i
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + head * size + i, mask=inside, other=0.0).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scaled *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32) * z * tl.sigmoid(z)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """rms_norm(x) * silu(gate), the norm over each head. x, gate: [num_tokens, heads * size], weight: [size]."""
    x, gate = x.contiguous(), gate if gate.stride(-1) == 1 else gate.contiguous()
    out = torch.empty_like(x) if out is None else out
    tokens, size = len(x), len(weight)
    heads = x.shape[1] // size
    if tokens:
        _gated_norm[(tokens, heads)](
            x, gate, weight, out, gate.stride(0), size, eps, heads, padded(size), num_warps=warps(padded(size))
        )
    return out


@triton.jit
def _sigmoid_gate(x, gate, other, out, gate_stride, size, BY_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = token * size + i
    from_gate = gate + token * gate_stride + (i * 0 if BY_TOKEN else i)
    gated = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gated *= tl.sigmoid(tl.load(from_gate, mask=inside, other=0.0).to(tl.float32))
    if other is not None:
        gated += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, gated.to(out.dtype.element_ty), mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor, other: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate), plus `other`. x, other: [num_tokens, size], gate: as x, or [num_tokens, 1]."""
    x, other = x.contiguous(), None if other is None else other.contiguous()
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    out = torch.empty_like(x) if out is None else out
    tokens, size = x.shape
    if tokens:
        grid = (tokens, triton.cdiv(size, BLOCK))
        _sigmoid_gate[grid](x, gate, other, out, gate.stride(0), size, gate.shape[1] == 1, BLOCK)
    return out
