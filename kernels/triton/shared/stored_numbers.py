"""Owns how numbers that are stored in 8 bits become floating-point numbers in registers.
Never rounds: each of them is exact in 16 bits."""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_UNIT = tl.constexpr(256.0)
"""Bits of e4m3 in the places of a float16's are the number divided by this."""
_COUNTER = tl.constexpr(0x4B000000)
COUNTER_VALUE = tl.constexpr(8388608.0)
"""2**23 in float32, whose lowest bits count ones, and as a number."""
_COUNTER_OF_INT8 = tl.constexpr(0x4B000080)
_INT8_ZERO = tl.constexpr(8388736.0)
"""The same with 128 added, which a byte's sign bit takes away."""


@triton.jit
def less_zero(number, zero):
    """Return number - zero in float32. number: 0 to 255; zero: with COUNTER_VALUE added. An addition, because
    conversions from integers are several times slower on a GPU."""
    return (number.to(tl.int32) | _COUNTER).to(tl.float32, bitcast=True) - zero


@triton.jit
def from_int8(number):
    """Return int8 in float32. One bitwise instruction adds 128 to the byte and places it, then less_zero's addition."""
    return ((number.to(tl.int32) & 0xFF) ^ _COUNTER_OF_INT8).to(tl.float32, bitcast=True) - _INT8_ZERO


@triton.jit
def e4m3(bits):
    """Return numbers of e4m3 divided by E4M3_UNIT, in float16. GPUs before 8.9 have no instruction for it.
    bits: int16"""
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
