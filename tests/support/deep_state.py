"""Owns a picture of all that an object holds, however deep, to compare before and after.
Never follows functions or classes, and leaves out what is only remembered so as not to be computed again."""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

LOOKED_UP = {"prefix_match", "tier_match", "memory_lack"}
"""What the planner keeps of a request's blocks in caches."""
RANKED = {"_changed", "_ranks", "_by_age", "aged", "age_key", "rank", "ranked_at"}
"""The queue's order among lanes, which is brought up to date when somebody looks."""
MEMOS = LOOKED_UP | RANKED | {"_rows"}
"""Fields that follow from others, as of now. `_rows` are those of answers' lengths."""


def deep_state(value: object) -> object:
    """Return a picture of `value` that is equal to another one if and only if the objects hold the same, in the same
    order. An object that occurs again is pictured by its number."""
    return _Picture().of(value)


class _Picture:
    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, object]] = {}  # with the object, so that its id stays its own

    def of(self, value: Any) -> object:
        if value is None or isinstance(value, int | float | str | bytes | Enum) or callable(value):
            return value
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, Mapping):
            return type(value), [(self.of(key), self.of(entry)) for key, entry in value.items()]
        if isinstance(value, Set):
            return type(value), sorted(map(repr, value))
        if hasattr(value, "__iter__") and hasattr(value, "__len__") and not _fields(value):
            return type(value), [self.of(entry) for entry in value]
        return type(value), [(name, self.of(getattr(value, name))) for name in _fields(value) if name not in MEMOS]


def _fields(value: object) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*(name for name in slots if hasattr(value, name)), *getattr(value, "__dict__", ())]
