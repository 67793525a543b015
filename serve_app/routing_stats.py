"""Owns what an engine replica tells the routers: its load and its cached prefixes, packed for Serve and unpacked.
Never measures: the numbers are the engine's, taken between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.protocol import LoadSnapshot
from serve_app.prefix_index import KEY_BYTES

_FORMAT = 1
"""Raised when the meaning changes: in a rolling update, routers and engines of two versions meet."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine at one moment. Counts are of requests, tokens or KV blocks."""

    taken_at_s: float
    """Wall clock of the engine's machine, in seconds."""
    num_requests: int
    """Running and waiting."""
    num_queued_tokens: int
    """Prompt tokens still to compute."""
    num_free_blocks: int
    """Neither held nor reserved for what running requests will need; blocks of unused prefixes count as free."""
    max_cached_blocks: int
    """The engine caches no more than these."""
    prefix_keys: tuple[bytes, ...]
    """Of cached blocks, heads of prefixes first."""
    all_prefixes: bool
    """Whether those are all that are cached."""


def encode(load: LoadSnapshot, digests: Sequence[bytes], *, limit: int, taken_at_s: float) -> dict[str, Any]:
    """The return value of `record_routing_stats`. `digests` are those of `AsyncEngine.cached_digests(limit)`.

    Serve pickles it, keeps it in its controller and sends it, with those of all other replicas, to every router each
    time that one of them changes: hence bytes, and few of them.
    """
    return {
        "format": _FORMAT,
        "taken_at_s": taken_at_s,
        "requests": load.num_running + load.num_waiting,
        "queued_tokens": load.num_queued_tokens,
        "free_blocks": max(load.num_blocks - load.num_held_blocks - load.num_reserved_blocks, 0),
        "cached_blocks": load.num_held_blocks + load.num_evictable_blocks,
        "prefixes": b"".join(digest[:KEY_BYTES] for digest in digests),
        "all_prefixes": len(digests) < limit,
    }


def settle(previous: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """`previous` if nothing but the time is new, so that idle engines cause no broadcasts; else `fresh`."""
    return previous if {**fresh, "taken_at_s": previous.get("taken_at_s")} == previous else fresh


def taken_at_s(stats: Mapping[str, Any]) -> float | None:
    """When the stats were taken; None if there are none that this version understands."""
    return stats["taken_at_s"] if stats.get("format") == _FORMAT else None


def decode(stats: Mapping[str, Any]) -> EngineReport | None:
    """What `encode` packed; None for a replica that has reported nothing yet, or in another version's format."""
    if stats.get("format") != _FORMAT:
        return None
    prefixes: bytes = stats["prefixes"]
    return EngineReport(
        taken_at_s=stats["taken_at_s"],
        num_requests=stats["requests"],
        num_queued_tokens=stats["queued_tokens"],
        num_free_blocks=stats["free_blocks"],
        max_cached_blocks=stats["cached_blocks"],
        prefix_keys=tuple(prefixes[i : i + KEY_BYTES] for i in range(0, len(prefixes), KEY_BYTES)),
        all_prefixes=stats["all_prefixes"],
    )
