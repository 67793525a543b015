"""Owns the merge of one more part of a softmax, whose queries saw other keys, as programs and `combine` do it alike.
Never depends on how many parts there are: they come in order, one after the other."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(best, mass, total, size, value):
    """Return (largest size, sum of weights relative to it, weighted sum of values) with one more part. Without any they
    are -inf, 0 and 0. A part without a key, whose size is -inf, changes no bit.

    best, mass, size: [n] float32, base 2; total, value: [n, head_dim]
    """
    new_best = tl.maximum(best, size)
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    kept, added = tl.exp2(best - finite), tl.exp2(size - finite)
    return new_best, mass * kept + added, total * kept[:, None] + value * added[:, None]
