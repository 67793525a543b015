"""Owns the number of engine replicas that this process's router knows, for whoever admits requests.
Never asks anybody; the router keeps it. It stands apart from the router, which Serve pickles by value: the router's own
module is another one, with globals of its own, where requests are routed."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []
_known: int | None = None  # written by the router's thread, read by any: one reference, so no lock


def num_engines() -> int | None:
    """Engine replicas that requests are routed to now; None before the router has heard of any deployment."""
    return _known


def set_num_engines(count: int) -> None:
    """Called by the router, on its thread."""
    global _known
    changed, _known = count != _known, count
    for listener in _listeners if changed else ():
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Have `listener` called after each change of the number, on the router's thread. It must not block."""
    _listeners.append(listener)
