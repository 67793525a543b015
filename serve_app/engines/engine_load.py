"""Owns the engines' load by their last reports, for the header that informs load balancers.
Never asks an engine: the router writes it. It is a module of its own for the same reason as engine_count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of all engines together."""

    kv_cache_usage: float
    """The share of KV blocks that requests hold, 0 to 1."""
    num_waiting: int
    """How many requests wait in the engines."""


_known: EngineLoad | None = None  # written by the router's thread, read by any: one reference, so no lock


def engine_load() -> EngineLoad | None:
    """Return the load; None before an engine has reported, and while there is no engine."""
    return _known


def set_engine_load(load: EngineLoad | None) -> None:
    """Set the load; called by the router, on its thread."""
    global _known
    _known = load
