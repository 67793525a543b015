"""Owns what happens to queries, keys and values before attention: per-head norms, rotation, the cache write.
Never touches a token without a slot (-1): such tokens pad a step to the size of a captured graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forward import HeadShape
from kernels.kv_format import LARGEST
from kernels.triton.elementwise.narrow import largest_of, scale_of, store_halves
from kernels.triton.shared.launch import padded, warps
from kernels.triton.shared.narrow_cache import writable
from kernels.triton.shared.overlap import overlapping, overlaps, wait_for_previous

HEADS_AT_A_TIME = 16


@triton.jit(do_not_specialize_on_alignment=["slots"])  # a row of a larger tensor, aligned or not
def _rotate(
    x,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    k_cache,
    v_cache,
    slots,
    token_stride,
    head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """TILE heads of one token per program. x: [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]

    Without slots, nothing is cached, and there are no KV heads. q: [num_tokens, NUM_HEADS, 2 * HALF]. BLOCK_SIZE: of a
    cache in 8 bits; None: the cache has the type of q.
    """
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64) if slots is not None else token
    if slot < 0:
        return
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, HALF_PADDED)
    is_q, is_k = head < NUM_HEADS, (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    inside = (i < HALF)[None, :]
    real = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside
    at = x + token * token_stride + head[:, None] * head_stride + i[None, :]
    first, second = tl.load(at, mask=real, other=0.0), tl.load(at + HALF, mask=real, other=0.0)  # [TILE, HALF_PADDED]
    one, two = first.to(tl.float32), second.to(tl.float32)
    if q_norm is not None:
        mean = (tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        one *= scale * _by_kind(q_norm, k_norm, i, i < HALF, is_q)
        two *= scale * _by_kind(q_norm + HALF, k_norm + HALF, i, i < HALF, is_q)
    c = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    one, two = one * c - two * s, two * c + one * s
    kind = q.dtype.element_ty
    to_q = q + (token * NUM_HEADS + head[:, None]) * (2 * HALF) + i[None, :]
    tl.store(to_q, one.to(kind), mask=is_q[:, None] & inside)
    tl.store(to_q + HALF, two.to(kind), mask=is_q[:, None] & inside)
    if BLOCK_SIZE is not None:
        if tl.program_id(1) * TILE + TILE > NUM_HEADS:  # other tiles have queries alone
            is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
            one = tl.where(is_v[:, None], first.to(tl.float32), one)
            two = tl.where(is_v[:, None], second.to(tl.float32), two)
            largest = tl.maximum(largest_of(one), largest_of(two), propagate_nan=tl.PropagateNan.ALL)
            unit = scale_of(largest, k_cache.dtype.element_ty)
            k_head, v_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS
            store_halves(one, two, unit, k_cache, slot, k_head, is_k, inside, i, NUM_KV_HEADS, HALF, BLOCK_SIZE)
            store_halves(one, two, unit, v_cache, slot, v_head, is_v, inside, i, NUM_KV_HEADS, HALF, BLOCK_SIZE)
    elif slots is not None:
        to_k = k_cache + (slot * NUM_KV_HEADS + head[:, None] - NUM_HEADS) * (2 * HALF) + i[None, :]
        tl.store(to_k, one.to(kind), mask=is_k[:, None] & inside)
        tl.store(to_k + HALF, two.to(kind), mask=is_k[:, None] & inside)
        is_v = real & (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        to_v = v_cache + (slot * NUM_KV_HEADS + head[:, None] - NUM_HEADS - NUM_KV_HEADS) * (2 * HALF) + i[None, :]
        tl.store(to_v, first, mask=is_v)
        tl.store(to_v + HALF, second, mask=is_v)


@triton.jit
def _by_kind(q_norm, k_norm, i, inside, is_q):
    """Load each head's norm weights in float32. # [TILE, HALF_PADDED]"""
    of_q = tl.load(q_norm + i, mask=inside, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + i, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], of_q[None, :], of_k[None, :])


def rotate_and_cache(
    qkv: Tensor,
    rotations: tuple[Tensor, Tensor],
    heads: HeadShape,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise queries and keys per head if `norms` is given, rotate them, and write keys and values to their slots.
    Return the queries. # [num_tokens, num_heads * head_dim]

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; rotations: cos and sin, [num_tokens, head_dim / 2]
    float32; cache: K and V, each [num_blocks, block_size, num_kv_heads, stored_size(head_dim)]; slots: [num_tokens]
    int64, -1 for a padding token, whose queries are not written either.
    """
    size = heads.num_heads * heads.head_dim
    out = torch.empty(len(qkv), size, dtype=qkv.dtype, device=qkv.device) if out is None else out
    by_head = qkv.view(len(qkv), -1, heads.head_dim)
    _launch(by_head, rotations, norms, out, cache, slots, heads.num_kv_heads, eps)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2). x: [num_tokens, heads, head_dim], cos and sin: [num_tokens, head_dim / 2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, (cos, sin), None, out, None, None, 0, 0.0)
    return out


def _launch(
    x: Tensor,
    rotations: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    q: Tensor,
    cache: tuple[Tensor, Tensor] | None,
    slots: Tensor | None,
    num_kv_heads: int,
    eps: float,
) -> None:
    tokens, heads, head_dim = x.shape
    tile = min(HEADS_AT_A_TIME, padded(heads))
    half = padded(head_dim // 2)
    grid = (tokens, triton.cdiv(heads, tile))
    cos, sin = (part.contiguous() for part in rotations)
    strides = (x.stride(0), x.stride(1))
    block_size = None if cache is None or cache[0].dtype not in LARGEST else cache[0].shape[1]
    caches = (None, None) if cache is None else tuple(map(writable, cache))
    shape = (heads - 2 * num_kv_heads, num_kv_heads, head_dim // 2, half, tile, block_size, overlaps())
    if tokens:
        _rotate[grid](
            x, cos, sin, *(norms or (None, None)), q, *caches, slots, *strides, eps, *shape,
            num_warps=warps(tile * half), **overlapping(),
        )  # fmt: skip
