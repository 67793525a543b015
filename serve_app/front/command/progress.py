"""Owns the line that shows how far simulations have come.
Never writes to standard output, which is for their result."""

from __future__ import annotations

import sys
import time

_CUT_OFF, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""What makes a terminal cut a wide line off, and not: a second row of it would stay when the line is rewritten."""


class Progress:
    """Rewrites a line on a terminal; elsewhere it prints one for each phase."""

    def __init__(self) -> None:
        self._phase, self._began, self._is_terminal = "", time.monotonic(), sys.stderr.isatty()

    def say(self, phase: str) -> None:
        self._phase = phase
        if not self._is_terminal:
            print(f"{time.monotonic() - self._began:4.0f} s  {phase}", file=sys.stderr, flush=True)

    def count(self, done: int, asked: int) -> None:
        if self._is_terminal:
            elapsed_s = time.monotonic() - self._began
            line = f"{elapsed_s:4.0f} s  {self._phase}: {done} of {asked} simulations so far"
            sys.stderr.write(f"\r\x1b[K{_CUT_OFF}{line}{_WRAP}")
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
