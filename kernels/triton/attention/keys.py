"""Owns the online softmax of a tile of queries over one tile of keys, which it reads through the block table.
Never reads a slot that a row does not own. Scales of K and V in 8 bits multiply scores and probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.shared.launch import dot
from kernels.triton.shared.narrow_cache import load_scales, numbers_at, scale_at, widened


@triton.jit
def add_keys(
    queries,
    best,
    mass,
    total,
    k_cache,
    v_cache,
    row_table,
    tile,
    start,
    end,
    position,
    window,
    scale,
    kv_head,
    NARROW: tl.constexpr,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (best, mass, total) updated by BLOCK_N keys from `tile` on. NARROW: K and V are in 8 bits. Not
    MASKED: every query sees all of them."""
    key = tile + tl.arange(0, BLOCK_N)
    i = tl.arange(0, HEAD_PADDED)
    inside, owned = i < HEAD_DIM, (key >= start) & (key < end)
    if MASKED:
        block = tl.load(row_table + key // BLOCK_SIZE, mask=owned, other=0).to(tl.int64)
        of_keys, of_values = owned[None, :] & inside[:, None], owned[:, None] & inside[None, :]
    else:
        block = tl.load(row_table + key // BLOCK_SIZE).to(tl.int64)
        of_keys, of_values = inside[:, None], inside[None, :]
    if NARROW:
        at = numbers_at(block, key % BLOCK_SIZE, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        keys = widened(tl.load(k_cache + at[None, :] + i[:, None], mask=of_keys, other=0.0), queries.dtype)
        of_scales = scale_at(block, key % BLOCK_SIZE, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        scales = load_scales(k_cache, of_scales, owned) * scale
        scores = dot(queries, keys, tl.zeros([TILE, BLOCK_N], tl.float32)) * scales[None, :]
    else:
        at = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        keys = tl.load(k_cache + at[None, :] + i[:, None], mask=of_keys, other=0.0)
        scores = dot(queries, keys, tl.zeros([TILE, BLOCK_N], tl.float32)) * scale
    if MASKED:
        seen = owned[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    finite = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best  # a query may have seen no key
    weights = tl.exp2(scores - finite[:, None])
    kept = tl.exp2(best - finite)
    values = tl.load(v_cache + at[:, None] + i[None, :], mask=of_values, other=0.0)
    scaled = weights
    if NARROW:
        scaled, values = _scaled(weights, values, load_scales(v_cache, of_scales, owned), queries.dtype)
    return new_best, mass * kept + tl.sum(weights, axis=1), dot(scaled.to(values.dtype), values, total * kept[:, None])


@triton.jit
def _scaled(weights, numbers, scales, kind: tl.constexpr):
    """Return (probabilities, values) whose product has the values' scales. weights: [TILE, BLOCK_N]; numbers: [BLOCK_N,
    HEAD_PADDED]; scales: [BLOCK_N]; kind: the type of the product's operands."""
    if kind == tl.float16:
        # A scale is the 127th or 448th part of a value: times a probability, it may be too small for float16.
        values = (widened(numbers, tl.float32) * scales[:, None]).to(kind)
    else:
        weights *= scales[None, :]
        values = widened(numbers, kind)
    return weights, values
