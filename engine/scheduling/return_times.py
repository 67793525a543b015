"""Owns what is known of how long blocks of a kind stay unused before a prompt has them again.
Never knows a block: it is told of intervals, and says what holding one is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable

PER_OCTAVE = 2
"""Intervals of time in a doubling."""
SHORTEST_S = 0.25
NUM_INTERVALS = 40
"""Up to 3 days; longer is as long."""
LEARN_AGAIN = 1.125
"""Factor by which observations grow until they are evaluated again."""


def interval_of(seconds: float) -> int:
    """Return the number of the interval that a time is in."""
    if seconds <= SHORTEST_S:
        return 0
    return min(int(PER_OCTAVE * math.log2(seconds / SHORTEST_S)) + 1, NUM_INTERVALS - 1)


def _begin(interval: int) -> float:
    return 0.0 if interval == 0 else SHORTEST_S * 2.0 ** ((interval - 1) / PER_OCTAVE)


_WIDTHS = [_begin(interval + 1) - _begin(interval) for interval in range(NUM_INTERVALS)]


class ReturnTimes:
    """Decaying counts, for one kind of block, of how their unused times ended: by another use, or for good.

    What holding a block is worth is an index as of Gittins: the largest rate, over all times that one may hold it on,
    of expected uses to expected seconds of holding.
    """

    def __init__(self, expected: Iterable[tuple[float, float]], never: float) -> None:
        """`expected`: pairs of seconds and a number of blocks that were used again after as long. `never`: blocks that
        were not, within an hour. With these, it begins."""
        self._returned = [0.0] * NUM_INTERVALS
        self._gone = [0.0] * NUM_INTERVALS
        for seconds, count in expected:
            self._returned[interval_of(seconds)] += count
        self._gone[interval_of(3600.0)] += never
        self.total = sum(self._returned) + sum(self._gone)
        self._evaluated = 0.0
        self._rates: list[float] = []

    def returned(self, seconds: float, count: int = 1) -> None:
        """Note uses of `count` blocks, `seconds` after those before."""
        self._returned[interval_of(seconds)] += count
        self.total += count

    def gone(self, seconds: float) -> None:
        """Note that a block was not used for `seconds`, and is not waited for any more."""
        self._gone[interval_of(seconds)] += 1
        self.total += 1

    def forget_half(self) -> None:
        self._returned = [0.5 * count for count in self._returned]
        self._gone = [0.5 * count for count in self._gone]
        self.total, self._evaluated = 0.5 * self.total, 0.5 * self._evaluated

    def rate(self, seconds: float) -> float:
        """Return the expected uses a second of holding on to a block that was not used for `seconds`."""
        if self.total > LEARN_AGAIN * self._evaluated:
            self._evaluate()
        return self._rates[interval_of(seconds)]

    def _evaluate(self) -> None:
        self._evaluated = self.total
        waits = [0.0] * NUM_INTERVALS  # block-seconds within each interval
        left = 0.0
        for interval in reversed(range(NUM_INTERVALS)):
            ended = self._returned[interval] + self._gone[interval]
            waits[interval] = (left + 0.5 * ended) * _WIDTHS[interval]
            left += ended
        self._rates = [self._best(interval, waits) for interval in range(NUM_INTERVALS)]

    def _best(self, begin: int, waits: list[float]) -> float:
        best = uses = seconds = 0.0
        for interval in range(begin, NUM_INTERVALS):
            uses += self._returned[interval]
            seconds += waits[interval]
            if seconds and uses > best * seconds:
                best = uses / seconds
        return best
