"""Owns histograms of milliseconds with buckets 0.2 % wide, so that percentiles are precise and those of several workers
can be added up. Never approximates minimum, maximum or mean: these are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

GROWTH = 1.002
"""Ratio of a bucket's upper end to its lower one. The error of a value is at most half a bucket."""
LEAST_MS = 1e-3
"""Shorter values count as this long: a client's clock does not resolve a microsecond."""
_LOG_GROWTH = math.log(GROWTH)


@dataclass(slots=True)
class Histogram:
    """The number of values in each bucket. Bucket `i` ends at LEAST_MS * GROWTH**i."""

    counts: dict[int, int] = field(default_factory=dict)
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @staticmethod
    def of(values: Iterable[float]) -> Histogram:
        histogram = Histogram()
        for value in values:
            histogram.add(value)
        return histogram

    def add(self, value_ms: float) -> None:
        """Raises: ValueError: the value is NaN, infinite or negative."""
        if not 0 <= value_ms < math.inf:
            raise ValueError(f"{value_ms} is no duration")
        bucket = math.ceil(math.log(value_ms / LEAST_MS) / _LOG_GROWTH) if value_ms > LEAST_MS else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += value_ms
        if value_ms < self.least:
            self.least = value_ms
        if value_ms > self.most:
            self.most = value_ms

    def merge(self, other: Histogram) -> None:
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def __len__(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Raises: ValueError: the histogram is empty."""
        return self.total / self._count()

    def percentiles(self, shares: Iterable[float]) -> list[float]:
        """Return the values at these shares (0 to 1, in any order), interpolated linearly between the two nearest
        ranks.

        Raises:
            ValueError: empty, or a share that is not within 0 and 1.
        """
        last = self._count() - 1
        buckets = sorted(self.counts)
        ends = list(accumulate(self.counts[bucket] for bucket in buckets))
        return [self._at(last * _checked(share), buckets, ends) for share in shares]

    def percentile(self, share: float) -> float:
        return self.percentiles([share])[0]

    def _at(self, rank: float, buckets: list[int], ends: list[int]) -> float:
        low, high = (self._value(k, buckets, ends) for k in (math.floor(rank), math.ceil(rank)))
        return low + (high - low) * (rank - math.floor(rank))

    def _value(self, k: int, buckets: list[int], ends: list[int]) -> float:
        """The k-th smallest value, to the precision of its bucket."""
        if k in (0, ends[-1] - 1):
            return self.least if k == 0 else self.most
        bucket = next(bucket for bucket, end in zip(buckets, ends, strict=True) if k < end)
        middle: float = LEAST_MS * GROWTH ** (bucket - 0.5)
        return min(max(middle, self.least), self.most)

    def _count(self) -> int:
        if not self.counts:
            raise ValueError("no values")
        return len(self)

    def to_json(self) -> dict[str, Any]:
        ends = {"least": self.least, "most": self.most} if self.counts else {}
        return {"counts": sorted(self.counts.items()), "total": self.total, **ends}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Histogram:
        return Histogram(**fields | {"counts": dict(fields["counts"])})


def _checked(share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"a share is within 0 and 1, not {share}")
    return share
