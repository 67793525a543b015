"""Owns what one process's router and its end of the token channel share about a deployment: which engines there are,
which of them are silent, and which engine each call went to.
Never decides which are silent. It is a module of its own for the same reason as engine_count."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.settings.engine_names import ENGINE


@dataclass(slots=True)
class _Known:
    """No lock is needed between the two threads: each value is a single reference, or an item of a dictionary, that is
    replaced and never modified."""

    engines: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    placed: dict[int, str | None] = field(default_factory=dict)
    has_left: bool = False
    """Whether calls may be open at engines that are no longer known. A full gate asks about these at each arrival."""


_deployments: dict[str, _Known] = {}


def _known(deployment: str) -> _Known:
    # `setdefault` is one step, whichever of the two threads comes first.
    return _deployments.get(deployment) or _deployments.setdefault(deployment, _Known())


def engines(deployment: str = ENGINE) -> frozenset[str]:
    """Return the engine replicas that the router knows."""
    return _known(deployment).engines


def set_engines(engine_ids: frozenset[str], deployment: str = ENGINE) -> None:
    """Set the known engine replicas; called by the router."""
    known = _known(deployment)
    before, known.engines = known.engines, engine_ids
    if before - engine_ids:
        known.has_left = True


def silent_engines(deployment: str = ENGINE) -> frozenset[str]:
    """Return the engine replicas that get no new requests."""
    return _known(deployment).silent


def set_silent_engines(engine_ids: frozenset[str], deployment: str = ENGINE) -> None:
    """Set the silent engine replicas; called by the channel."""
    _known(deployment).silent = engine_ids


def open_call(stream_id: int, deployment: str = ENGINE) -> None:
    """Note that a call is about to be made; `close_call` ends it."""
    _known(deployment).placed[stream_id] = None


def place_call(stream_id: int, engine_id: str, deployment: str = ENGINE) -> None:
    """Note where a call was sent; called by the router. Ignored for a call that was closed meanwhile."""
    known = _known(deployment)
    if stream_id in known.placed:
        known.placed[stream_id] = engine_id
        if engine_id not in known.engines:
            known.has_left = True


def placed_at(stream_id: int, deployment: str = ENGINE) -> str | None:
    """Return the engine replica to which an open call was sent; None while it has none yet."""
    return _known(deployment).placed.get(stream_id)


def engines_with_calls(deployment: str = ENGINE) -> frozenset[str]:
    """Return the engine replicas to which open calls were sent."""
    return frozenset(_known(deployment).placed.copy().values()) - {None}  # type: ignore[return-value]


def num_leaving_calls(deployment: str = ENGINE) -> int:
    """Count the open calls at engine replicas that the router no longer knows: those that Serve stops finish theirs."""
    known = _known(deployment)
    if not known.has_left:
        return 0
    known.has_left = False  # first, as the router may set it meanwhile
    stay, placed = known.engines | {None}, known.placed.copy()
    found = len(placed) - sum(map(stay.__contains__, placed.values()))
    if found:
        known.has_left = True
    return found


def close_call(stream_id: int, deployment: str = ENGINE) -> None:
    _known(deployment).placed.pop(stream_id, None)
