"""Owns how many short runs of integers become one piece of memory.
Never looks at them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


def joined(parts: Iterable[Sequence[int]]) -> array[int]:
    """All parts one after another, 64 bits each."""
    numbers = array("q")
    for part in parts:
        numbers += array("q", part)
    return numbers
