"""Owns the watch over a thread that waits for a device: a wait that lasts too long is reported once.
Never ends a wait itself: whoever is told does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watch:
    """One thread's waits, one at a time. A second thread looks at the clock, which costs a wait nothing."""

    def __init__(self, on_late: Callable[[float], None], poll_s: float) -> None:
        """on_late: called by the watching thread with the limit that has passed, once for each wait. poll_s: how often
        it looks."""
        self._on_late, self._poll_s = on_late, poll_s
        self._wait: tuple[float, float] | None = None
        """(when it is too long, its limit) of the current wait."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ranks-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, limit_s: float) -> Iterator[None]:
        """Watch the body."""
        self._wait = time.monotonic() + limit_s, limit_s
        try:
            yield
        finally:
            self._wait = None

    def close(self) -> None:
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _look(self) -> None:
        told: tuple[float, float] | None = None
        while not self._ending.wait(self._poll_s):
            wait = self._wait
            if wait is not None and wait is not told and time.monotonic() >= wait[0]:
                told = wait
                self._on_late(wait[1])
