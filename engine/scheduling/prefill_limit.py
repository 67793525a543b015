"""Owns how much prefill a step may carry after steps ran out of device memory: less at once, and more again in time.
Never knows why memory was short; it may have been a neighbour's doing, and over."""

from __future__ import annotations

GROWTH = 16
"""A good step gives back this part of the whole limit. So it is whole again within a long prompt or two, and a shortage
that lasts is met where it begins, and not far beyond."""

PATIENCE = 32
"""Good steps at a limit before one that failed is tried again: where memory stays short, one step in so many fails."""


class PrefillLimit:
    """Halved by a shortage, and grown by each good step that had use for more (additive increase, multiplicative
    decrease). Counted like a step's prefill, as `ChunkRule.cost` does."""

    def __init__(self, most: int, block_size: int) -> None:
        self._most, self._least = most, min(block_size, most)
        self._value = most
        self._retry: int | None = None  # of the step that is tried again
        self._failed_at: int | None = None
        self._num_good = 0
        self._cost_requests = False  # the second try failed too, and its rows with it

    @property
    def value(self) -> int:
        """Of the next step."""
        return self._value if self._retry is None else min(self._retry, self._value)

    @property
    def is_whole(self) -> bool:
        return self._value == self._most and self._retry is None

    def ran_out(self, prefill: int, *, again: bool) -> None:
        """A step with so much prefill failed; `again`: it was the second try. Tried with half of that, it is smaller
        than what failed. Steps after it have half of what all had: a small step tells nothing of what a large one may
        take."""
        self._cost_requests |= again
        self._retry = self._at_least(prefill // 2)
        self._failed_at = self._value
        self._value = self._at_least(self._value // 2)
        self._num_good = 0

    def begin(self) -> None:
        """A step with prefill was begun: whatever becomes of it, the one after it is no second try."""
        self._retry = None

    def went_well(self, prefill: int) -> None:
        """A step with so much prefill was computed. Less than half of the limit tells nothing of a higher one."""
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
        """The engine is idle, and holds memory for no request: start over. But not after a shortage that cost requests,
        which would cost each lone one that comes after an idle time."""
        self._retry = None
        if not self._cost_requests:
            self._value, self._failed_at, self._num_good = self._most, None, 0

    def _at_least(self, limit: int) -> int:
        return max(limit, self._least)
