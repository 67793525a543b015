"""Owns integers that order as float32 numbers do, so that bisection can find a bound.
Never orders anything itself."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_KEY = tl.constexpr(-(2**31))


@triton.jit
def order_key(logit):
    """Return an int32 that orders as the float32 does. Both zeros have the same key."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """Return the logit that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
