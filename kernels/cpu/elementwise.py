"""Owns norms, rotation, activation and cache writes in a few torch operators, on the tensors' device.
Never loops over tokens, and never decides which rows exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.narrow_cache import narrow
from kernels.kv_format import LARGEST


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.reference.rms_norm. x: [..., size], weight: [size]."""
    if weight.dtype != x.dtype:  # a model family may keep its norms in float32
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (normed sum in x's type, sum in float32). x, residual: [num_tokens, size], residual in float32."""
    total = residual + x
    return F.rms_norm(total, weight.shape, weight.float(), eps).to(x.dtype), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate. x: [num_tokens, heads, head_dim]; cos, sin: [num_tokens, head_dim / 2] float32, which promote x."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    half = cos.shape[-1]
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated.to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store token t's K and V in slot slots[t]. k, v: [num_tokens, kv_heads, head_dim]; caches: [num_blocks,
    block_size, kv_heads, head_dim], or narrow_cache's layout."""
    for x, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype in LARGEST:
            cache.view(torch.int8).flatten(0, 1).index_copy_(0, slots, narrow(x, cache.dtype))
        else:
            cache.flatten(0, 1).index_copy_(0, slots, x)
