"""Owns K and V in 8 bits: each token's vector of one KV head, followed by a scale of its own.
Never changes what was stored: reading it again gives the same bits, whatever was written beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_format import LARGEST, SCALE_BYTES


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise [..., head_dim] to [..., head_dim + 4] bytes, as int8."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
    units = wide / scale.clamp(min=torch.finfo(torch.float32).tiny)
    numbers = units.round().to(torch.int8) if dtype == torch.int8 else units.to(dtype).view(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), dim=-1)


def widen(stored: Tensor, dtype: torch.dtype, to: torch.dtype) -> Tensor:
    """Convert [..., head_dim + 4] bytes that `narrow` made for `dtype` to [..., head_dim] in `to`."""
    numbers = stored[..., :-SCALE_BYTES].contiguous().view(dtype).float()
    return (numbers * stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)).to(to)
