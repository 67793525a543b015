"""Packs and unpacks what an engine replica reports to the routers through Serve: its load and its cached prefixes.
Never measures: the numbers come from the engine, between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from engine.async_engine import AsyncEngine
from engine.kv_tiers import Tier
from engine.prefix_index import KEY_BYTES
from engine.protocol import EngineError, LoadSnapshot, PrefillCosts
from serve_app.engines.versions import EngineVersion

_FORMAT = 1
"""Increased when the meaning changes, because routers and engines of two versions meet in a rolling update."""

_CHANGES = ("requests", "queued_tokens", "free_blocks", "cached_blocks", "prefixes", "adapters", "tiers")
"""Changes in these fields are published. With a queue every report is, because routers expect it to become shorter."""
_COST_CHANGE = 0.1
"""So is a relative change of what a prompt token costs by more than this: it varies a little all the time."""


class TierReport(NamedTuple):
    """What an engine has in one of its tiers."""

    prefix_keys: tuple[bytes, ...]
    """The keys of blocks that are in no nearer place, heads of prefixes first."""
    all_prefixes: bool
    """Whether those are all."""
    num_blocks: int
    """The engine knows of this many blocks in the tier, those that are also nearer included."""


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The state of one engine at one moment. Counts are of requests, tokens or KV blocks."""

    taken_at_s: float
    """The wall clock of the engine's machine, in seconds."""
    num_requests: int
    """Running and waiting requests."""
    num_queued_tokens: int
    """Prompt tokens that are still to be computed."""
    prefill_tokens_per_s: float
    """The rate at which the engine computes them."""
    num_waiting: int
    """How many of the requests wait."""
    num_blocks: int
    """The size of the KV cache; 0 from an engine of an earlier version, which does not report it."""
    num_held_blocks: int
    num_free_blocks: int
    """Blocks neither held nor reserved for running requests; blocks of unused prefixes count as free."""
    max_cached_blocks: int
    """The engine caches at most this many blocks."""
    prefix_keys: tuple[bytes, ...]
    """The keys of cached blocks, heads of prefixes first."""
    all_prefixes: bool
    """Whether those are all cached blocks."""
    adapter_keys: frozenset[bytes] = frozenset()
    """The keys of the LoRA adapters in memory; see adapter_key."""
    queued_prefill_s: float | None = None
    """Predicted seconds until those tokens are computed; None from an engine that does not predict, such as one of
    an earlier version."""
    prefill_costs: PrefillCosts | None = None
    """By these, a new prompt's time is predicted; None likewise."""
    idle_prefill_costs: PrefillCosts | None = None
    """By these, the least time of a new prompt; None likewise."""
    tiers: tuple[TierReport, ...] = ()
    """The tiers below the KV cache, nearest first."""


def adapter_key(digest: str) -> bytes:
    """Shorten an adapter's digest to its key in reports."""
    return bytes.fromhex(digest)[:KEY_BYTES]


def encode(
    load: LoadSnapshot,
    digests: Sequence[bytes],
    *,
    limit: int,
    prefill_tokens_per_s: float,
    taken_at_s: float,
    adapters: Sequence[str] = (),
    tiers: Mapping[Tier, Sequence[bytes]] | None = None,
    version: EngineVersion | None = None,
) -> dict[str, Any]:
    """Pack the return value of `record_routing_stats`. `digests`: from `AsyncEngine.cached_digests(limit)`. `adapters`:
    the digests of the engine's adapters. `tiers`: from `AsyncEngine.tier_digests(limit)`, if there are tiers.
    `version`: what the engine is.

    Serve pickles the value, keeps it in its controller, and sends it with those of all other replicas to every router
    each time that one of them changes. Therefore it consists of few bytes.
    """
    predicted: dict[str, float] = {}
    if load.queued_prefill_s is not None and (costs := load.prefill_costs) is not None:
        predicted = {"queued_prefill_s": load.queued_prefill_s, "token_s": costs.token_s, "pair_s": costs.pair_s}
        if (idle := load.idle_prefill_costs) is not None:
            predicted |= {"idle_token_s": idle.token_s, "idle_pair_s": idle.pair_s}
    return {
        **predicted,
        **({} if version is None else {"version": astuple(version)}),
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
        "prefixes": _packed(digests),
        "all_prefixes": len(digests) < limit,
        "adapters": b"".join(sorted(map(adapter_key, adapters))),
        "tiers": [
            (tier.tier.value, _packed(found), len(found) < limit, tier.num_blocks)
            for tier in load.tiers
            for found in ((tiers or {}).get(tier.tier, ()),)
        ],
    }


class RoutingReporter:
    """Reports one engine's stats, for which Serve's controller asks every `stats_period_s`."""

    def __init__(
        self,
        engine: AsyncEngine,
        published_blocks: int,
        prefill_tokens_per_s: Callable[[], float],
        version: EngineVersion | None = None,
    ) -> None:
        self._engine = engine
        self._version = version
        self._limit = published_blocks
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._last: dict[str, Any] = {}

    async def report(self) -> dict[str, Any]:
        """Return the engine's stats. As long as nothing changes, and no queue should have, return the previous ones,
        because Serve broadcasts each change."""
        try:
            digests = await self._engine.cached_digests(self._limit)
            tiers = await self._tier_digests()
        except EngineError:  # the engine is dead, which the health check reports
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
            tiers=tiers,
            version=self._version,
        )
        changed = any(fresh[name] != self._last.get(name) for name in _CHANGES)
        if fresh["queued_tokens"] or changed or _cost_changed(self._last.get("token_s"), fresh.get("token_s")):
            self._last = fresh
        return self._last

    async def _tier_digests(self) -> Mapping[Tier, Sequence[bytes]]:
        if not self._engine.load().tiers:
            return {}
        return await self._engine.tier_digests(self._limit)


def _cost_changed(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before is not now
    return abs(now - before) > _COST_CHANGE * before


def taken_at_s(stats: Mapping[str, Any]) -> float | None:
    """Return when the stats were taken; None if there are none in a format of this version."""
    return stats["taken_at_s"] if stats.get("format") == _FORMAT else None


def version_of(stats: Mapping[str, Any]) -> EngineVersion | None:
    """Return what the engine is that reported the stats; None before its first report."""
    return EngineVersion(*stats["version"]) if stats.get("format") == _FORMAT and "version" in stats else None


def decode(stats: Mapping[str, Any]) -> RoutingReport | None:
    """Unpack stats; None for a replica that has reported nothing yet, or in another version's format."""
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
        queued_prefill_s=stats.get("queued_prefill_s"),
        prefill_costs=PrefillCosts(stats["token_s"], stats["pair_s"]) if "token_s" in stats else None,
        idle_prefill_costs=(
            PrefillCosts(stats["idle_token_s"], stats["idle_pair_s"]) if "idle_token_s" in stats else None
        ),
        tiers=tuple(
            TierReport(_keys(packed), complete, num_blocks)
            for _, packed, complete, num_blocks in stats.get("tiers", ())
        ),
    )


def _packed(digests: Sequence[bytes]) -> bytes:
    return b"".join(digest[:KEY_BYTES] for digest in digests)


def _keys(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES))
