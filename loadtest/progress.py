"""Owns the progress line that a terminal shows while a load runs.
Never judges the run: the report does."""

from __future__ import annotations

from typing import TextIO

from loadtest.plan import Plan
from loadtest.tally import Tally

BAR = 24
"""Width of the progress bar, in characters."""
CUT_OFF, WRAP = "\x1b[?7l", "\x1b[?7h"
"""What makes a terminal cut a wide line off, and not: a second row of it would stay when the line is rewritten."""
EVERY = 10
"""Without a terminal, one of this many calls prints a line."""


class Progress:
    """Rewrites one line on a terminal; elsewhere, such as in a log, prints a line now and then."""

    def __init__(self, plan: Plan, stream: TextIO) -> None:
        self.point = ""
        """The name of the current point."""
        self._seconds = sum(point.seconds for point in plan.points)
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._calls = 0

    def show(self, elapsed_s: float, tally: Tally, in_flight: int) -> None:
        line = self._line(elapsed_s, tally, in_flight)
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{CUT_OFF}{line}{WRAP}")
        elif self._calls % EVERY == 0:
            self._stream.write(f"{line}\n")
        self._calls += 1
        self._stream.flush()

    def end(self) -> None:
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, elapsed_s: float, tally: Tally, in_flight: int) -> str:
        whole = tally.whole()
        share = min(elapsed_s / self._seconds, 1.0)
        bar = "#" * round(BAR * share)
        counts = whole.counts
        parts = [
            f"[{bar:.<{BAR}}] {elapsed_s:.0f}/{self._seconds:.0f} s",
            self.point,
            f"{counts['offered']} ended, {in_flight} in flight, "
            f"{counts['failed']} failed, {counts['rejected']} refused",
        ]
        if counts["offered"]:
            parts.append(f"good {100 * counts['good'] / counts['offered']:.0f} %")
        for name, title in (("ttft", "TTFT"), ("itl", "ITL"), ("lag", "lag")):
            if histogram := whole.times[name]:
                p50, p99 = histogram.percentiles((0.5, 0.99))
                parts.append(f"{title} {p50:.0f}/{p99:.0f} ms")
        return " | ".join(part for part in parts if part)
