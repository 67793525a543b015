"""Owns the online softmax of a tile of queries over one tile of keys, which it reads through the block table.
Never reads a slot that a row does not own. Scales of K and V in 8 bits multiply scores and probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.shared.launch import dot
from kernels.triton.shared.narrow_cache import load_scales, numbers_at, scale_at, widened


@triton.jit
def attend_keys(
    queries,
    k_cache,
    v_cache,
    row_table,
    lowest,
    seen_by_all,
    start,
    end,
    position,
    window,
    scale,
    kv_head,
    NARROW: tl.constexpr,
    WINDOWED: tl.constexpr,
    DECODE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return each query's (largest score, sum of weights relative to it, weighted sum of values, divided by the sum of
    weights) over the keys [start, end), whose tiles begin at `lowest`. All queries see the keys before `seen_by_all`.
    The sum of weights of a query that sees no key is 1."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, HEAD_PADDED], tl.float32)
    masked = lowest
    if not WINDOWED:
        masked += tl.maximum(seen_by_all - lowest, 0) // BLOCK_N * BLOCK_N
        for tile in tl.range(lowest, masked, BLOCK_N):
            best, mass, total = add_keys(
                queries, best, mass, total, k_cache, v_cache, row_table, tile, start, end, position, window, scale,
                kv_head, NARROW, False, DECODE, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE, BLOCK_N,
            )  # fmt: skip
    for tile in tl.range(masked, end, BLOCK_N):
        best, mass, total = add_keys(
            queries, best, mass, total, k_cache, v_cache, row_table, tile, start, end, position, window, scale,
            kv_head, NARROW, True, DECODE, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE, BLOCK_N,
        )  # fmt: skip
    divisor = tl.where(mass > 0.0, mass, 1.0)
    return best, divisor, total / divisor[:, None]


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
    DECODE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (best, mass, total) updated by BLOCK_N keys from `tile` on. NARROW: K and V are in 8 bits. Not
    MASKED: every query sees all of them. DECODE: all queries are of one token, which sees the keys [start, end)."""
    key = tile + tl.arange(0, BLOCK_N)
    i = tl.arange(0, HEAD_PADDED)
    owned = (key >= start) & (key < end)
    at, of_scales = places_of(
        row_table, tile, owned, kv_head, NARROW, MASKED, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N
    )
    keys = load_numbers(k_cache, at[None, :] + i[:, None], owned[None, :], i[:, None], MASKED, HEAD_DIM, HEAD_PADDED)
    if NARROW:
        keys = widened(keys, queries.dtype)
        scale *= load_scales(k_cache, of_scales, owned)[None, :]
    scores = dot(queries, keys, tl.zeros([TILE, BLOCK_N], tl.float32)) * scale
    if MASKED:
        seen = owned[None, :]
        if not DECODE:
            seen = seen & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    finite = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best  # a query may have seen no key
    weights = tl.exp2(scores - finite[:, None])
    kept = tl.exp2(best - finite)
    values = load_numbers(v_cache, at[:, None] + i[None, :], owned[:, None], i[None, :], MASKED, HEAD_DIM, HEAD_PADDED)
    mass = mass * kept + tl.sum(weights, axis=1)
    if NARROW:
        weights, values = _scaled(weights, values, load_scales(v_cache, of_scales, owned), queries.dtype)
    return new_best, mass, dot(weights.to(values.dtype), values, total * kept[:, None])


@triton.jit
def places_of(
    row_table,
    tile,
    owned,
    kv_head,
    NARROW: tl.constexpr,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where the numbers of each key of a tile begin in K or V, and where its scale is if they are NARROW. A tile
    within one block has one entry of the table, and its keys are at constant distances."""
    offset = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(row_table + tile // BLOCK_SIZE).to(tl.int64)
        offset += tile % BLOCK_SIZE
    elif MASKED:
        block = tl.load(row_table + (tile + offset) // BLOCK_SIZE, mask=owned, other=0).to(tl.int64)
        offset = (tile + offset) % BLOCK_SIZE
    else:
        block = tl.load(row_table + (tile + offset) // BLOCK_SIZE).to(tl.int64)
        offset = (tile + offset) % BLOCK_SIZE
    if NARROW:
        at = numbers_at(block, offset, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        return at, scale_at(block, offset, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    at = block * (BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM) + (offset * NUM_KV_HEADS + kv_head) * HEAD_DIM
    return at, at


@triton.jit
def load_numbers(cache, at, owned, i, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr):
    """Return the numbers at `at` in K or V, and 0 for keys that are not `owned` and beyond HEAD_DIM."""
    if MASKED:
        return tl.load(cache + at, mask=owned & (i < HEAD_DIM), other=0.0)
    if HEAD_DIM == HEAD_PADDED:
        return tl.load(cache + at)
    return tl.load(cache + at, mask=tl.broadcast_to(i < HEAD_DIM, at.shape), other=0.0)


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
