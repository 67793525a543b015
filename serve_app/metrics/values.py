"""Owns the numbers: histograms that are counted up, and samples as they travel between replicas.
Never knows what a name means; the catalogue does."""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeVar

import msgspec

T = TypeVar("T")


class MalformedSamples(Exception):
    """Bytes that no replica of ours has written."""


class Distribution(msgspec.Struct, array_like=True, frozen=True):
    """A histogram at a moment. `counts` are those of each bucket alone; the last one has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One number of one replica. `labels` are those that the catalogue lists, in its order."""

    name: str
    labels: tuple[str, ...]
    value: int | float | Distribution


class ReplicaSamples(msgspec.Struct, array_like=True, frozen=True):
    """What one replica has measured since it started."""

    replica_id: str
    samples: tuple[Sample, ...]


_encoder = msgspec.msgpack.Encoder()


def encode(told: object) -> bytes:
    """What a replica tells the one that asked."""
    return _encoder.encode(told)


def decode(data: bytes, kind: type[T]) -> T:
    """May raise MalformedSamples."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedSamples(str(error)) from error


class Histogram:
    """Counts how often a value fell between two bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` rise; a value that is equal to one belongs below it."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._sum)
