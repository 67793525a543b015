"""Owns the search for the row of a tile or a work item, where rows of different lengths have consecutive ones.
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


@triton.jit
def find_item_row(sums, num_rows, item):
    """Return the row of an item by bisection. sums: [num_rows + 1], how many items there are before each row."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(sums + middle) <= item
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    return low
