"""Tunes a replica's Python interpreter: when garbage is collected, and how long a thread's turn is.
Never measures; the figures are in serve_app/NOTES.md and in loadtest/results."""

from __future__ import annotations

import gc
import sys

TURN_S = 0.0005


def spare_garbage_collections() -> None:
    """Exclude all current objects from collections, and collect less often. Call it when everything exists that lives
    as long as the process. Full collections paused steps for 20 to 30 ms, and young ones, at every 700 objects, took a
    quarter of the time of a token."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def take_short_turns() -> None:
    """For an event loop beside threads of Python. After each system call, such as a socket's send, the loop waits for
    the end of a thread's turn: with Python's 5 ms, a tenth of a second for the tokens of twenty streams. An engine's
    thread of steps waits for the loop likewise, and a step of a GPU may take less than 5 ms."""
    sys.setswitchinterval(TURN_S)
