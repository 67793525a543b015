"""Owns the timing of a step loop: how long the current step has lasted, and how long the slowest recent steps took.
Never decides what follows from that. The step thread writes it; any thread may read it."""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE_S = 120.0
"""Half-life of the slowest step's time, in seconds of work, so that an idle night forgets nothing. The first step may
have compiled kernels for ten seconds; later steps must not be given so much time."""
MOST_GROWTH = 2.0
"""Maximum growth of the slowest time by one step. A process that was stopped for a minute had one step of a minute,
which says nothing about the next. Steps that are really longer occur again, and after a few the time has grown to
theirs."""


class StepClock:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._began: float | None = None  # None while the loop waits for work
        self.slowest_s = 0.0

    def come_round(self) -> None:
        """Note that the loop has finished its step, if it ran one, and begins the next."""
        now = self._clock()
        if self._began is not None:
            self._learn(now - self._began)
        self._began = now

    def rest(self) -> None:
        """Note that the loop has finished its step and waits for work."""
        if self._began is not None:
            self._learn(self._clock() - self._began)
        self._began = None

    def _learn(self, took_s: float) -> None:
        believed = min(took_s, self.slowest_s * MOST_GROWTH) if self.slowest_s else took_s
        self.slowest_s = max(believed, self.slowest_s * 0.5 ** (took_s / HALF_LIFE_S))

    @property
    def stood_s(self) -> float:
        """How long the current step has lasted; 0 while the loop waits for work."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def stands(self, least_s: float, times: float) -> bool:
        """Whether the current step has lasted `least_s`, and `times` as long as the slowest recent step."""
        return self.stood_s > max(least_s, times * self.slowest_s)
