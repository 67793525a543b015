"""Owns the search for the row of a program's tile, where rows of different lengths are cut into consecutive tiles.
Never asks the host, which does not know the lengths in a captured step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(begins, first_row, num_rows, tile, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return (row, its first tile). Rows have consecutive tiles, each row at most one more than it fills.

    Row r's tiles begin at `begins[r] * GROUP // TILE + r`; bisection finds the row.
    """
    first_token = tl.load(begins + first_row)
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        at = (tl.load(begins + first_row + middle) - first_token) * GROUP // TILE + middle
        low, high = tl.where(at <= tile, middle, low), tl.where(at <= tile, high, middle)
    return first_row + low, (tl.load(begins + first_row + low) - first_token) * GROUP // TILE + low
