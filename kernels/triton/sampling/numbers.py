"""Owns the numbers that sampling kernels share: the mass of a logit, and the random number of a position.
Never keeps a random state: the number is a function of (seed, position), the same as the CPU sampler's."""

from __future__ import annotations

import triton
import triton.language as tl

# Below this, division by the temperature would overflow; sampling is greedy long before.
SMALLEST_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit
def mass_of(logit, best, temperature):
    """exp((logit - best) / temperature) in float64: 1 for the most likely token."""
    return tl.exp((logit.to(tl.float64) - best.to(tl.float64)) / temperature)


@triton.jit
def uniform(seed, position):
    """Draw a number in [0, 1): the top 53 bits of Philox4x32-10's first 64 (Salmon et al., SC 2011). seed, position:
    int64

    Key: the seed's low and high 32 bits. Counter: the position's low and high 32 bits, 0, 0.
    """
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = ((first.to(tl.uint64) << 32) | second.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
