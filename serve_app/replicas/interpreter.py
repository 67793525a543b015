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
    """Shorten the turns of Python threads for the event loop beside them. After each system call, such as a socket's
    send, the loop waits for the end of a thread's turn: with Python's default of 5 ms, that is a tenth of a second for
    the tokens of twenty streams."""
    sys.setswitchinterval(TURN_S)
