"""Owns the number of engine replicas that this process's routers know, by deployment, for the code that admits.
Never asks an engine: a router writes it. It is a module of its own because Serve pickles the router by value: where
requests are routed, the router's module is another copy, with globals of its own."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.settings.engine_names import ENGINE

_listeners: list[Callable[[], None]] = []
_known: dict[str, int] = {}  # written by the routers' thread, read by any: items are only replaced, so no lock


def num_engines(deployment: str = ENGINE) -> int | None:
    """Return how many engine replicas get requests now; None before the router has heard of any deployment."""
    return _known.get(deployment)


def set_num_engines(count: int, deployment: str = ENGINE, *, joined: bool = False) -> None:
    """Set the number; called by the router, on its thread. `joined`: one of them is new, whatever the number."""
    changed = joined or count != _known.get(deployment)
    _known[deployment] = count
    for listener in _listeners if changed else ():
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` after each change of a number, and when an engine has joined, on the router's thread. It must not
    block."""
    _listeners.append(listener)
