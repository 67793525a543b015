"""Owns the engines' load by their last reports, by deployment, for the header that informs load balancers.
Never asks an engine: the router writes it. It is a module of its own for the same reason as engine_count."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.settings.engine_names import ENGINE


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of all engines of a deployment together."""

    kv_cache_usage: float
    """The share of KV blocks that requests hold, 0 to 1."""
    num_waiting: int
    """How many requests wait in the engines."""


_known: dict[str, EngineLoad | None] = {}  # written by the routers' thread, read by any, as in engine_count


def engine_load(deployment: str = ENGINE) -> EngineLoad | None:
    """Return the load; None before an engine has reported, and while there is no engine."""
    return _known.get(deployment)


def set_engine_load(load: EngineLoad | None, deployment: str = ENGINE) -> None:
    """Set the load; called by the router, on its thread."""
    _known[deployment] = load
