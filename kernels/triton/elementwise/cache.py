"""Owns the plain write of keys and values to the cache.
Never touches a token without a slot (-1): such tokens pad a step to the size of a captured graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.shared.launch import padded, warps


@triton.jit(do_not_specialize_on_alignment=["slots"])  # a row of a larger tensor, aligned or not
def _write(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    """One token per program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head, i = tl.arange(0, TILE)[:, None], tl.arange(0, HEAD_PADDED)[None, :]
    real = (head < NUM_KV_HEADS) & (i < HEAD_DIM)
    to = (slot * NUM_KV_HEADS + head) * HEAD_DIM + i
    tl.store(k_cache + to, tl.load(k + token * k_token_stride + head * k_head_stride + i, mask=real), mask=real)
    tl.store(v_cache + to, tl.load(v + token * v_token_stride + head * v_head_stride + i, mask=real), mask=real)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store each token's K and V in its slot; -1: nowhere. k, v: [num_tokens, kv_heads, head_dim]; caches: [num_blocks,
    block_size, kv_heads, head_dim]; slots: [num_tokens]."""
    tokens, kv_heads, head_dim = k.shape
    tile = (padded(kv_heads), padded(head_dim))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    strides = (*k.stride()[:2], *v.stride()[:2])
    if tokens:
        _write[(tokens,)](
            k, v, k_cache, v_cache, slots, *strides, kv_heads, head_dim, *tile, num_warps=warps(tile[0] * tile[1])
        )
