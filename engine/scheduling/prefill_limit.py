"""Owns the limit of prefill in a step after steps ran out of device memory: it drops at once and recovers gradually.
Never knows why memory was short: another process may have caused it, and the shortage may be over."""

from __future__ import annotations

GROWTH = 16
"""A good step raises the limit by the whole limit divided by this. So it recovers within a long prompt or two, and a
persistent shortage is met just beyond its threshold, not far beyond."""

PATIENCE = 32
"""Number of good steps before a failed limit is tried again: if memory stays short, one step in this many fails."""


class PrefillLimit:
    """A limit that a shortage halves and each good step that could use more raises (additive increase, multiplicative
    decrease). It is in the units of `ChunkRule.cost`."""

    def __init__(self, most: int, block_size: int) -> None:
        self._most, self._least = most, min(block_size, most)
        self._value = most
        self._retry: int | None = None  # the limit of the step that is retried
        self._failed_at: int | None = None
        self._num_good = 0
        self._cost_requests = False  # whether the retry failed too, and its rows with it

    @property
    def value(self) -> int:
        """The limit of the next step."""
        return self._value if self._retry is None else min(self._retry, self._value)

    @property
    def is_whole(self) -> bool:
        return self._value == self._most and self._retry is None

    def ran_out(self, prefill: int, *, again: bool) -> None:
        """Lower the limit after a step with this much prefill ran out of memory; `again` means that it was the retry.
        The retry gets half of the step's own prefill, so that it is smaller than the failed step. Later steps get half
        of the current limit: a small step says nothing about how much a large one may take."""
        self._cost_requests |= again
        self._retry = self._at_least(prefill // 2)
        self._failed_at = self._value
        self._value = self._at_least(self._value // 2)
        self._num_good = 0

    def begin(self) -> None:
        """Note that a step with prefill has begun: the step after it is not a retry."""
        self._retry = None

    def went_well(self, prefill: int) -> None:
        """Raise the limit after a step with this much prefill was computed. A step with less than half of the limit
        says nothing about a higher one."""
        if 2 * prefill < self._value:
            return
        self._num_good += 1
        larger = min(self._value + max(self._most // GROWTH, 1), self._most)
        if self._failed_at is not None and larger >= self._failed_at:
            if self._num_good < PATIENCE:
                return
            self._failed_at = None
        self._num_good, self._value = 0, larger
        self._cost_requests &= larger < self._most

    def rest(self) -> None:
        """Restore the whole limit when the engine is idle and holds no request's memory. Not after a shortage that
        failed requests: otherwise each single request after an idle time would fail, too."""
        self._retry = None
        if not self._cost_requests:
            self._value, self._failed_at, self._num_good = self._most, None, 0

    def _at_least(self, limit: int) -> int:
        return max(limit, self._least)
