"""Owns what one process's router and its end of the token channel share: which engines there are, which of them are
silent, and which engine each call went to.
Never decides which are silent. It is a module of its own for the same reason as engine_count."""

from __future__ import annotations

# No lock is needed between the two threads: each value is a single reference, or an item of a dictionary, that is
# replaced and never modified.
_engines: frozenset[str] = frozenset()
_silent: frozenset[str] = frozenset()
_placed: dict[int, str | None] = {}


def engines() -> frozenset[str]:
    """Return the engine replicas that the router knows."""
    return _engines


def set_engines(engine_ids: frozenset[str]) -> None:
    """Set the known engine replicas; called by the router."""
    global _engines
    _engines = engine_ids


def silent_engines() -> frozenset[str]:
    """Return the engine replicas that get no new requests."""
    return _silent


def set_silent_engines(engine_ids: frozenset[str]) -> None:
    """Set the silent engine replicas; called by the channel."""
    global _silent
    _silent = engine_ids


def open_call(stream_id: int) -> None:
    """Note that a call is about to be made; `close_call` ends it."""
    _placed[stream_id] = None


def place_call(stream_id: int, engine_id: str) -> None:
    """Note where a call was sent; called by the router. Ignored for a call that was closed meanwhile."""
    if stream_id in _placed:
        _placed[stream_id] = engine_id


def placed_at(stream_id: int) -> str | None:
    """Return the engine replica to which an open call was sent; None while it has none yet."""
    return _placed.get(stream_id)


def engines_with_calls() -> frozenset[str]:
    """Return the engine replicas to which open calls were sent."""
    return frozenset(_placed.copy().values()) - {None}  # type: ignore[return-value]


def close_call(stream_id: int) -> None:
    _placed.pop(stream_id, None)
