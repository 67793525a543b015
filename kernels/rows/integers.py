"""Owns the joining of many short runs of integers into one buffer.
Never looks at their values."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


def joined(parts: Iterable[Sequence[int]]) -> array[int]:
    """Concatenate all parts, as 64-bit integers."""
    numbers = array("q")
    for part in parts:
        numbers += array("q", part)
    return numbers
