"""Owns the plain write of keys and values to the cache, in its own type.
Never touches a token without a slot (-1): such tokens pad a step to the size of a captured graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_format import LARGEST
from kernels.triton.elementwise.narrow import largest_of, scale_of, store_numbers, store_scales
from kernels.triton.shared.launch import padded, warps
from kernels.triton.shared.narrow_cache import writable


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
    BLOCK_SIZE: tl.constexpr,
):
    """One token per program. BLOCK_SIZE: of a cache in 8 bits; None: the cache has the type of k and v."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head, i = tl.arange(0, TILE)[:, None], tl.arange(0, HEAD_PADDED)[None, :]
    real = (head < NUM_KV_HEADS) & (i < HEAD_DIM)
    from_k = k + token * k_token_stride + head * k_head_stride + i
    from_v = v + token * v_token_stride + head * v_head_stride + i
    if BLOCK_SIZE is None:
        to = (slot * NUM_KV_HEADS + head) * HEAD_DIM + i
        tl.store(k_cache + to, tl.load(from_k, mask=real), mask=real)
        tl.store(v_cache + to, tl.load(from_v, mask=real), mask=real)
    else:
        _narrow(from_k, k_cache, slot, real, NUM_KV_HEADS, HEAD_DIM, TILE, HEAD_PADDED, BLOCK_SIZE)
        _narrow(from_v, v_cache, slot, real, NUM_KV_HEADS, HEAD_DIM, TILE, HEAD_PADDED, BLOCK_SIZE)


@triton.jit
def _narrow(
    source,
    cache,
    slot,
    real,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Store a token's K or V in 8 bits. source: pointers, and real: which to read, both [TILE, HEAD_PADDED]"""
    x = tl.load(source, mask=real, other=0.0).to(tl.float32)
    head, i = tl.arange(0, TILE), tl.arange(0, HEAD_PADDED)
    scale = scale_of(largest_of(x), cache.dtype.element_ty)
    store_numbers(x, scale, cache, slot, head, i, real, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    store_scales(scale, cache, slot, head, head < NUM_KV_HEADS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store each token's K and V in its slot; -1: nowhere. k, v: [num_tokens, kv_heads, head_dim]; caches: [num_blocks,
    block_size, kv_heads, stored_size(head_dim)]; slots: [num_tokens]."""
    tokens, kv_heads, head_dim = k.shape
    tile = (padded(kv_heads), padded(head_dim))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    strides = (*k.stride()[:2], *v.stride()[:2])
    block_size = k_cache.shape[1] if k_cache.dtype in LARGEST else None
    caches = writable(k_cache), writable(v_cache)
    if tokens:
        _write[(tokens,)](
            k, v, *caches, slots, *strides, kv_heads, head_dim, *tile, block_size, num_warps=warps(tile[0] * tile[1])
        )
