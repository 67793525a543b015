"""Owns what one process's router and its end of the token channel tell each other: which engines there are, which of
them are silent, and which engine each call went to.
Never decides who is silent. It stands apart from the router for the same reason as engine_count."""

from __future__ import annotations

# One reference each, replaced and never changed, or a dictionary whose items are: so no lock between the two threads.
_engines: frozenset[str] = frozenset()
_silent: frozenset[str] = frozenset()
_placed: dict[int, str | None] = {}


def engines() -> frozenset[str]:
    """The engine replicas that the router knows."""
    return _engines


def set_engines(engine_ids: frozenset[str]) -> None:
    """Called by the router."""
    global _engines
    _engines = engine_ids


def silent_engines() -> frozenset[str]:
    """Engine replicas that are sent no new request."""
    return _silent


def set_silent_engines(engine_ids: frozenset[str]) -> None:
    """Called by the channel."""
    global _silent
    _silent = engine_ids


def open_call(stream_id: int) -> None:
    """A call is about to be made; `close_call` ends it."""
    _placed[stream_id] = None


def place_call(stream_id: int, engine_id: str) -> None:
    """Called by the router. Ignored for a call that was closed meanwhile."""
    if stream_id in _placed:
        _placed[stream_id] = engine_id


def placed_at(stream_id: int) -> str | None:
    """The engine replica that an open call was sent to; None while it looks for one."""
    return _placed.get(stream_id)


def engines_with_calls() -> frozenset[str]:
    """Where open calls were sent to."""
    return frozenset(_placed.copy().values()) - {None}  # type: ignore[return-value]


def close_call(stream_id: int) -> None:
    _placed.pop(stream_id, None)
