"""Measures one amount of waiting work, such as queued tokens: how much there is, and how fast it is worked off.
Never decides what is too much; it estimates how long a given part of it will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 30
"""The seconds of work over which a rate is measured, in slots of one second."""
MIN_WAIT_S, MAX_WAIT_S = 0.25, 60.0
"""Bounds of an estimate: a retry has a cost however fast the server is, and OpenAI's clients give up after 120 s."""


class Backlog:
    """Rates are per second of busy time, so that a quiet hour does not count as a slow one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self.amount = 0
        self._clock = clock
        self._busy_s = 0.0  # busy time up to `_since`
        self._since = 0.0
        self._served: deque[list[int]] = deque()  # [slot, amount], at most WINDOW_S of them

    def add(self, amount: int) -> None:
        if not self.amount:
            self._since = self._clock()
        self.amount += amount

    def remove(self, amount: int, *, served: bool) -> None:
        """Remove an amount. `served`: it was worked off; only this counts for the rate."""
        assert 0 <= amount <= self.amount, f"removing {amount} of {self.amount}"
        now_s = self._busy_now()
        if served:
            self._record(int(now_s), amount)
        self._busy_s, self._since = now_s, self._clock()
        self.amount -= amount

    def _busy_now(self) -> float:
        return self._busy_s + (self._clock() - self._since if self.amount else 0.0)

    def _record(self, slot: int, amount: int) -> None:
        if not self._served or self._served[-1][0] != slot:
            self._served.append([slot, 0])
        self._served[-1][1] += amount
        while self._served[0][0] <= slot - WINDOW_S:
            self._served.popleft()

    def _window(self) -> tuple[int, float]:
        """Return the amount served in the window, and the window's length so far in seconds."""
        now_s = self._busy_now()
        first = max(0, int(now_s) - WINDOW_S + 1)
        return sum(amount for slot, amount in self._served if slot >= first), now_s - first

    @property
    def per_second(self) -> float:
        """The rate; 0 while nothing was measured."""
        served, seconds = self._window()
        return served / seconds if seconds > 0 else 0.0

    def wait_s(self, amount: int) -> float:
        """Estimate the seconds until `amount` is worked off. If nothing was served in the window, estimate that it
        takes another window's length."""
        served, seconds = self._window()
        estimate = amount * seconds / served if served else seconds
        return bounded(estimate)


def bounded(wait_s: float) -> float:
    """Keep an estimate within its bounds."""
    return min(max(wait_s, MIN_WAIT_S), MAX_WAIT_S)
