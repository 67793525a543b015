"""Owns the kinds of single values in a config.json: a field of another kind is refused by its name.
Never knows what a field is for: whoever reads it does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]


def integer(raw: Fields, key: str, default: int | None = None) -> int:
    """A positive number. Raises ValueError where it is none."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}: expected a positive integer.")
    return value


def number(raw: Fields, key: str, default: float | None = None) -> float:
    """A positive, finite number. Raises ValueError where it is none."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}: expected a positive number.")
    return float(value)


def numbers(raw: Fields, key: str) -> tuple[float, ...]:
    """A list of them. Raises ValueError where it is none, or an entry is no positive, finite number."""
    return tuple(number({key: value}, key) for value in sequence(raw, key))


def sequence(raw: Fields, key: str) -> Sequence[Any]:
    """A list; without an entry where there is none. Raises ValueError where it is something else."""
    value = raw.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError(f"{key} is {value!r}: expected a list.")
    return value or ()


def section(raw: Fields, key: str) -> Fields:
    """An object; without a field where there is none. Raises ValueError where it is something else."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}: expected an object.")
    return value or {}
