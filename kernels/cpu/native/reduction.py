"""Owns what a recorded pass needs to sum over ranks: a function of C, and the error where it fails.
Never sums: kernels.collectives does, and knows the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reduction:
    """int function(void* context, int wide, void* numbers, int64_t count): sum in place; not 0 once a rank is lost.

    `wide` is 1 for float32 and 0 for bfloat16. One thread at a time calls it, any of a team's.
    """

    function: int
    """Its address."""
    context: int
    """Its first argument."""
    error: Callable[[], BaseException]
    """Return what to raise after it has failed."""
    owner: Any
    """What must live for as long as the function may be called."""
