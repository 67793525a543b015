"""Owns how a token's K and V are rounded to 8 bits with a scale for each KV head, as on a CPU, and stored.
Never hides what is not finite: the scale of such a vector is not, either."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kv_format import LARGEST
from kernels.triton.shared.narrow_cache import as_scales, numbers_at, scale_at

_INT8_LARGEST, _E4M3_LARGEST = (tl.constexpr(largest) for largest in LARGEST.values())
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2**22, it leaves the nearest integer in the lowest bits."""
_TO_SUBNORMAL = tl.constexpr(2.0**14)
_TO_SUBNORMAL_BITS = tl.constexpr(0x46800000)
"""The same for multiples of 2**-9, the subnormal numbers of e4m3; as a number, and as its bits."""


@triton.jit
def largest_of(x):
    """Return each head's largest magnitude, NaN if the head has one. x: [heads, n] float32 # [heads]"""
    is_nan = tl.max((x != x).to(tl.int32), axis=1) > 0  # a maximum of floats passes over NaN
    return tl.where(is_nan, float("nan"), tl.max(tl.abs(x), axis=1))


@triton.jit
def scale_of(largest, kind: tl.constexpr):
    """Return the scale of a vector with this largest magnitude. kind: int8, or uint8 for e4m3."""
    return tl.div_rn(largest, _E4M3_LARGEST if kind == tl.uint8 else _INT8_LARGEST)


@triton.jit
def narrowed(x, scale, kind: tl.constexpr):
    """Return x / scale, rounded to the nearest number of kind, ties to even. x: [heads, n] float32; scale: [heads]"""
    units = tl.div_rn(x, tl.maximum(scale, _SMALLEST_NORMAL)[:, None])  # zeros have a scale of 0
    return (_e4m3_bits(units) if kind == tl.uint8 else (units + _TO_INTEGER).to(tl.int32, bitcast=True)).to(kind)


@triton.jit
def _e4m3_bits(units):
    """Return the bits of the nearest e4m3. units: float32, of magnitudes below 464, which would no more become 448."""
    magnitude = tl.abs(units)
    bits = magnitude.to(tl.int32, bitcast=True)
    # The three upper bits of a float32's fraction, and an exponent whose bias is 7 and not 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + _TO_SUBNORMAL).to(tl.int32, bitcast=True) - _TO_SUBNORMAL_BITS
    sign = (units.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(magnitude < 0.015625, subnormal, normal) | sign  # 2**-6


@triton.jit
def store_numbers(
    x,
    scale,
    cache,
    slot,
    kv_head,
    i,
    mask,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Store the numbers of a slot's KV heads at places i. x, mask: [heads, n]; scale, kv_head: [heads]; i: [n]"""
    at = numbers_at(slot // BLOCK_SIZE, slot % BLOCK_SIZE, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    tl.store(cache + at[:, None] + i[None, :], narrowed(x, scale, cache.dtype.element_ty), mask=mask)


@triton.jit
def store_scales(
    scale, cache, slot, kv_head, mask, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Store the scales of a slot's KV heads. scale, kv_head, mask: [heads]"""
    at = scale_at(slot // BLOCK_SIZE, slot % BLOCK_SIZE, kv_head, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    tl.store(as_scales(cache) + at, scale, mask=mask)


@triton.jit
def store_halves(
    one,
    two,
    scale,
    cache,
    slot,
    kv_head,
    owned,
    inside,
    i,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Store the halves of those heads that are `owned` in 8 bits. one, two: [TILE, HALF_PADDED]; scale, kv_head, owned:
    [TILE]; inside: [1, HALF_PADDED]"""
    mask = owned[:, None] & inside
    store_numbers(one, scale, cache, slot, kv_head, i, mask, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF)
    store_numbers(two, scale, cache, slot, kv_head, HALF + i, mask, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF)
    store_scales(scale, cache, slot, kv_head, owned, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF)
