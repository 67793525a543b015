"""Owns the type checks of single values in a config.json: a field of the wrong type is refused by name.
Never knows what a field is for: its callers do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]
_LARGEST_INTEGER = 2**63 - 1  # larger ones are no sizes, and cannot be divided as floats


def integer(raw: Fields, key: str, default: int | None = None) -> int:
    """Read a positive integer. Raises ValueError if the field is not one."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_INTEGER:
        raise ValueError(f"{key} is {value!r}: expected a positive integer.")
    return value


def number(raw: Fields, key: str, default: float | None = None) -> float:
    """Read a positive, finite number. Raises ValueError if the field is not one."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{key} is {value!r}: expected a positive number.")
    return float(value)


def numbers(raw: Fields, key: str) -> tuple[float, ...]:
    """Read a list of positive, finite numbers. Raises ValueError if the field is something else."""
    return tuple(number({key: value}, key) for value in sequence(raw, key))


def sequence(raw: Fields, key: str) -> Sequence[Any]:
    """Read a list, empty if the field is missing. Raises ValueError if it is something else."""
    value = raw.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise ValueError(f"{key} is {value!r}: expected a list.")
    return value or ()


def section(raw: Fields, key: str) -> Fields:
    """Read an object, empty if the field is missing. Raises ValueError if it is something else."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}: expected an object.")
    return value or {}
