"""Owns what an engine replica tells the routers: its load and its cached prefixes, packed for Serve and unpacked.
Never measures: the numbers are the engine's, taken between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.async_engine import AsyncEngine
from engine.protocol import EngineError, LoadSnapshot
from serve_app.routing.prefix_index import KEY_BYTES

_FORMAT = 1
"""Raised when the meaning changes: in a rolling update, routers and engines of two versions meet."""

_NEWS = ("requests", "queued_tokens", "free_blocks", "cached_blocks", "prefixes", "adapters")
"""What makes an idle engine's stats new. A queue is always news: routers expect it to become shorter."""


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """One engine at one moment. Counts are of requests, tokens or KV blocks."""

    taken_at_s: float
    """Wall clock of the engine's machine, in seconds."""
    num_requests: int
    """Running and waiting."""
    num_queued_tokens: int
    """Prompt tokens still to compute."""
    prefill_tokens_per_s: float
    """How fast those become fewer."""
    num_waiting: int
    """Of those, requests that wait."""
    num_blocks: int
    """Of the KV cache; 0 from an engine of an earlier version, which does not say."""
    num_held_blocks: int
    num_free_blocks: int
    """Neither held nor reserved for what running requests will need; blocks of unused prefixes count as free."""
    max_cached_blocks: int
    """The engine caches no more than these."""
    prefix_keys: tuple[bytes, ...]
    """Of cached blocks, heads of prefixes first."""
    all_prefixes: bool
    """Whether those are all that are cached."""
    adapter_keys: frozenset[bytes] = frozenset()
    """Of the LoRA adapters in memory; see adapter_key."""


def adapter_key(digest: str) -> bytes:
    """What stands for an adapter's digest in reports."""
    return bytes.fromhex(digest)[:KEY_BYTES]


def encode(
    load: LoadSnapshot,
    digests: Sequence[bytes],
    *,
    limit: int,
    prefill_tokens_per_s: float,
    taken_at_s: float,
    adapters: Sequence[str] = (),
) -> dict[str, Any]:
    """The return value of `record_routing_stats`. `digests` are those of `AsyncEngine.cached_digests(limit)`, and
    `adapters` the digests of its adapters.

    Serve pickles it, keeps it in its controller and sends it, with those of all other replicas, to every router each
    time that one of them changes: hence bytes, and few of them.
    """
    return {
        "format": _FORMAT,
        "taken_at_s": taken_at_s,
        "requests": load.num_running + load.num_waiting,
        "queued_tokens": load.num_queued_tokens,
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "waiting": load.num_waiting,
        "blocks": load.num_blocks,
        "held_blocks": load.num_held_blocks,
        "free_blocks": max(load.num_blocks - load.num_held_blocks - load.num_reserved_blocks, 0),
        "cached_blocks": load.num_held_blocks + load.num_evictable_blocks,
        "prefixes": b"".join(digest[:KEY_BYTES] for digest in digests),
        "all_prefixes": len(digests) < limit,
        "adapters": b"".join(sorted(map(adapter_key, adapters))),
    }


class RoutingReporter:
    """Answers for one engine what Serve's controller asks of it each `stats_period_s`."""

    def __init__(self, engine: AsyncEngine, published_blocks: int, prefill_tokens_per_s: Callable[[], float]) -> None:
        self._engine = engine
        self._limit = published_blocks
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._last: dict[str, Any] = {}

    async def report(self) -> dict[str, Any]:
        """The engine's stats; the same as before while nothing changes and nothing should, since Serve broadcasts each
        change."""
        try:
            digests = await self._engine.cached_digests(self._limit)
        except EngineError:  # dead, which the health check tells
            return self._last
        load = self._engine.load()
        rate = self._prefill_tokens_per_s()
        fresh = encode(
            load,
            digests,
            limit=self._limit,
            prefill_tokens_per_s=rate,
            taken_at_s=time.time(),
            adapters=self._engine.adapters.loaded,
        )
        if fresh["queued_tokens"] or any(fresh[name] != self._last.get(name) for name in _NEWS):
            self._last = fresh
        return self._last


def taken_at_s(stats: Mapping[str, Any]) -> float | None:
    """When the stats were taken; None if there are none that this version understands."""
    return stats["taken_at_s"] if stats.get("format") == _FORMAT else None


def decode(stats: Mapping[str, Any]) -> RoutingReport | None:
    """What `encode` packed; None for a replica that has reported nothing yet, or in another version's format."""
    if stats.get("format") != _FORMAT:
        return None
    return RoutingReport(
        taken_at_s=stats["taken_at_s"],
        num_requests=stats["requests"],
        num_queued_tokens=stats["queued_tokens"],
        prefill_tokens_per_s=stats["prefill_tokens_per_s"],
        num_waiting=stats.get("waiting", 0),
        num_blocks=stats.get("blocks", 0),
        num_held_blocks=stats.get("held_blocks", 0),
        num_free_blocks=stats["free_blocks"],
        max_cached_blocks=stats["cached_blocks"],
        prefix_keys=_keys(stats["prefixes"]),
        all_prefixes=stats["all_prefixes"],
        adapter_keys=frozenset(_keys(stats.get("adapters", b""))),
    )


def _keys(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES))
