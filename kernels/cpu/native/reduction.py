"""Owns what a recorded pass needs to sum over ranks and to exchange rows with them: functions of C, and their errors.
Never sums: kernels.collectives does, and knows the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reduction:
    """int function(void* context, int wide, void* numbers, int64_t count): sum in place; not 0 once a rank is lost.

    `wide` is 1 for float32 and 0 for bfloat16. The thread that runs the program calls it.
    """

    function: int
    """Its address."""
    context: int
    """Its first argument."""
    error: Callable[[], BaseException]
    """Return what to raise after it has failed."""
    owner: Any
    """What must live for as long as the function may be called."""


@dataclass(frozen=True, slots=True)
class RowExchange:
    """int function(void* context, const char* rows, int64_t row_bytes, const int64_t* counts, int64_t* received,
    char* out, int64_t room): see kernels.collectives.group.ExchangeGroup. Not 0 once a rank is lost, or if more rows
    than `room` come.

    The thread that runs the program calls it.
    """

    function: int
    """Its address."""
    context: int
    """Its first argument."""
    rank: int
    size: int
    """How many ranks there are, of which each holds as many experts as another, or one more."""
    error: Callable[[], BaseException]
    """Return what to raise after it has failed."""
    owner: Any
    """What must live for as long as the function may be called."""
