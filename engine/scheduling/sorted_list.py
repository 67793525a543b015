"""Owns a list that stays sorted while values are added and removed, with O(log n) comparisons each.
Never looks inside a value: the caller chooses values that sort as needed, and no two are equal."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])

LOAD = 512
"""A bucket has at most twice as many values, so that a change moves at most that many pointers."""


class SortedList(Generic[T]):
    """Sorted buckets of bounded length. A heap would keep values that are removed from its middle, and every later walk
    would have to skip them."""

    def __init__(self) -> None:
        self._buckets: list[list[T]] = []
        self._lasts: list[T] = []  # the last value of each bucket
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        for bucket in self._buckets:
            yield from bucket

    @property
    def first(self) -> T:
        return self._buckets[0][0]

    @property
    def last(self) -> T:
        return self._lasts[-1]

    def add(self, value: T) -> None:
        self._length += 1
        if not self._lasts:
            self._buckets, self._lasts = [[value]], [value]
            return
        if self._lasts[-1] < value:  # the usual case
            number = len(self._lasts) - 1
            bucket = self._buckets[number]
            bucket.append(value)
        else:
            number = bisect_left(self._lasts, value)
            bucket = self._buckets[number]
            insort(bucket, value)
        if len(bucket) > 2 * LOAD:
            self._buckets.insert(number + 1, bucket[LOAD:])
            self._lasts.insert(number, bucket[LOAD - 1])
            del bucket[LOAD:]
            number += 1
        self._lasts[number] = self._buckets[number][-1]

    def remove(self, value: T) -> None:
        """Remove a value. Raises KeyError if it is not in the list."""
        number = bisect_left(self._lasts, value)
        bucket = self._buckets[number] if number < len(self._buckets) else []
        place = bisect_left(bucket, value)
        if place == len(bucket) or bucket[place] != value:
            raise KeyError(value)
        del bucket[place]
        self._length -= 1
        if bucket:
            self._lasts[number] = bucket[-1]
        else:
            del self._buckets[number], self._lasts[number]
