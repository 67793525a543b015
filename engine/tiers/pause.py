"""Owns when to try again what keeps failing: at once at first, then after intervals that double.
Never waits: who comes too early is told so. Logs a warning for a row of failures, and not one for each."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 300.0
QUIET_S = 300.0
"""Rows of failures that begin sooner after a warning than this have none: a disk that is nearly full fails and works in
turns."""
TOLERATED = 3
"""Failures in a row before the first pause."""

logger = logging.getLogger(__name__)


class Pause:
    """Usable on any number of threads at once."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """what: the subject of the log's sentences, as in `stores to /var/kv`."""
        self._what, self._clock = what, clock
        self._mutex = threading.Lock()
        self._failures = 0
        self._last = ""
        self._until = 0.0
        self._warned_at = -math.inf

    def refusal(self) -> str:
        """Return why not to try now; empty if one may. During failures, only one caller an interval may."""
        with self._mutex:
            if self._failures < TOLERATED:
                return ""
            now = self._clock()
            if now < self._until:
                return f"{self._what} pause for {self._until - now:.0f} s after {self._failures} failures: {self._last}"
            self._until = now + self._interval()  # others wait for how this one ends
            return ""

    def failed(self, error: object) -> None:
        with self._mutex:
            self._failures += 1
            self._last, now = str(error), self._clock()
            self._until = now + self._interval()
            warns = self._failures == 1 and now - self._warned_at >= QUIET_S
            if warns:
                self._warned_at = now
        if warns:
            logger.warning(
                "%s fail and are tried again less and less often; the metrics count them: %s", self._what, error
            )

    def succeeded(self) -> None:
        with self._mutex:
            failures, self._failures = self._failures, 0
        if failures:
            logger.debug("%s work again after %d failures", self._what, failures)

    def _interval(self) -> float:
        doublings = min(max(0, self._failures - TOLERATED), 32)
        return min(LONGEST_S, FIRST_S * 2.0**doublings)
