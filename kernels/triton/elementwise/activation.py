"""Owns the gated activation of the feed-forward layer.
Never multiplies matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_and_mul(x, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(x + row * 2 * size + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size], contiguous."""
    tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device) if out is None else out
    if tokens:
        _silu_and_mul[(tokens, triton.cdiv(size, BLOCK))](x.contiguous(), out, size, BLOCK)
    return out
