"""Owns the time of a step loop: how long it has stood at its step, and how long its slowest steps took lately.
Never decides what follows from that. The step thread writes it; any thread reads it."""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE_S = 120.0
"""Of the slowest step, in seconds of work: an idle night forgets nothing. The first step may have compiled its kernels
for ten seconds; no later one is to be waited for as long."""
MOST_GROWTH = 2.0
"""A process that was stopped for a minute had one step of a minute, which says nothing of its next. Steps that are
really longer than before come again, so a few of them are enough to be believed."""


class StepClock:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._began: float | None = None  # None while the loop waits for work
        self.slowest_s = 0.0

    def come_round(self) -> None:
        """The loop has finished its step, if it was at one, and goes on to the next."""
        now = self._clock()
        if self._began is not None:
            self._learn(now - self._began)
        self._began = now

    def rest(self) -> None:
        """The loop has finished its step and waits for work."""
        if self._began is not None:
            self._learn(self._clock() - self._began)
        self._began = None

    def _learn(self, took_s: float) -> None:
        believed = min(took_s, self.slowest_s * MOST_GROWTH) if self.slowest_s else took_s
        self.slowest_s = max(believed, self.slowest_s * 0.5 ** (took_s / HALF_LIFE_S))

    @property
    def stood_s(self) -> float:
        """How long the loop has been at its step; 0 while it waits for work."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def stands(self, least_s: float, times: float) -> bool:
        """Whether the loop has been at its step for `least_s`, and for so many times its slowest step."""
        return self.stood_s > max(least_s, times * self.slowest_s)
