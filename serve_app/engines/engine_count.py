"""Owns the number of engine replicas that this process's router knows, for the code that admits requests.
Never asks an engine: the router writes it. It is a module of its own because Serve pickles the router by value: where
requests are routed, the router's module is another copy, with globals of its own."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []
_known: int | None = None  # written by the router's thread, read by any: one reference, so no lock


def num_engines() -> int | None:
    """Return how many engine replicas get requests now; None before the router has heard of any deployment."""
    return _known


def set_num_engines(count: int) -> None:
    """Set the number; called by the router, on its thread."""
    global _known
    changed, _known = count != _known, count
    for listener in _listeners if changed else ():
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` after each change of the number, on the router's thread. It must not block."""
    _listeners.append(listener)
