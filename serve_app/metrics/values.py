"""Defines histograms, and the samples that travel between replicas.
Never knows the meaning of a name: the catalogue does."""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeVar

import msgspec

T = TypeVar("T")


class MalformedSamples(Exception):
    """The bytes were not written by a replica of this server."""


class Distribution(msgspec.Struct, array_like=True, frozen=True):
    """A histogram at one moment. `counts`: of each bucket, not cumulative; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One number of one replica. `labels`: the values for the catalogue's labels, in its order."""

    name: str
    labels: tuple[str, ...]
    value: int | float | Distribution


class ReplicaSamples(msgspec.Struct, array_like=True, frozen=True):
    """All samples of one replica, measured since it started."""

    replica_id: str
    samples: tuple[Sample, ...]


_encoder = msgspec.msgpack.Encoder()


def encode(answer: object) -> bytes:
    """Encode a replica's answer."""
    return _encoder.encode(answer)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a replica's answer; may raise MalformedSamples."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedSamples(str(error)) from error


class Histogram:
    """Counts how often a value fell between two bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: in increasing order. A value equal to a bound counts below it."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._sum)
