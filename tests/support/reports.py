"""Builds what engines report to routers, from the few numbers that a test is about."""

from __future__ import annotations

from typing import Any

from engine.protocol import LoadSnapshot, PrefillCosts
from serve_app.routing.stats import encode


def snapshot(
    *,
    requests: int = 0,
    waiting: int = 0,
    queued: int = 0,
    free_blocks: int = 100,
    cached: int = 0,
    queued_s: float = 0.0,
    costs: PrefillCosts | None = None,
) -> LoadSnapshot:
    """Return the load of an engine with 100 KV blocks, which predicts times if it has `costs`."""
    return LoadSnapshot(
        num_running=requests - waiting,
        num_waiting=waiting,
        num_preparing=0,
        num_waiting_preempted=0,
        wait_reason=None,
        num_queued_tokens=queued,
        num_blocks=100,
        num_held_blocks=100 - free_blocks,
        num_evictable_blocks=cached,
        num_reserved_blocks=0,
        num_steps=0,
        num_preemptions=0,
        reserve_ratio=0.0,
        reserve_margin=0.5,
        queued_prefill_s=None if costs is None else queued_s,
        prefill_costs=costs,
        idle_prefill_costs=costs,
    )


def stats(taken_at_s: float, *digests: bytes, limit: int = 100, rate: float = 0.0, **load: Any) -> dict[str, Any]:
    """Return what an engine with that load and those cached blocks returns to Serve."""
    return encode(snapshot(**load), digests, limit=limit, prefill_tokens_per_s=rate, taken_at_s=taken_at_s)
