"""Owns how busy the engines were by their last reports, for whoever tells a load balancer.
Never asks anybody; the router keeps it. It stands apart from the router for the same reason as engine_count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Of all engines together."""

    kv_cache_usage: float
    """Share of KV blocks that requests hold, 0 to 1."""
    num_waiting: int
    """Requests that wait in the engines."""


_known: EngineLoad | None = None  # written by the router's thread, read by any: one reference, so no lock


def engine_load() -> EngineLoad | None:
    """None before an engine has reported, and while there is none."""
    return _known


def set_engine_load(load: EngineLoad | None) -> None:
    """Called by the router, on its thread."""
    global _known
    _known = load
