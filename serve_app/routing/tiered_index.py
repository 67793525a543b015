"""Owns what a router assumes about all the places where an engine keeps KV: its KV cache, and the tiers below.
Never tells one tier from another, and never says what loading costs: placement has a setting for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.prefix_index import PrefixIndex
from serve_app.routing.stats import RoutingReport


class Found(NamedTuple):
    """How much of a prompt a replica has, in blocks or in tokens."""

    num_cached: int
    """From the prompt's beginning on, wherever it is."""
    num_loaded: int = 0
    """The part of that which is only in a tier, so that it has to be loaded."""


NOTHING = Found(0)


class TieredIndex:
    """Holds two indexes for each replica: of its KV cache, and of its tiers.

    Tiers are filled from the KV cache, so what is sent to a replica that has tiers is expected in both, and outlives
    there what the KV cache loses.
    """

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: how many blocks are kept for a replica's KV cache, and as many again for its tiers."""
        self._cache, self._tiers = PrefixIndex(max_blocks), PrefixIndex(max_blocks)

    def num_blocks(self, replica_id: str) -> int:
        """Return how many blocks are remembered of a replica."""
        return self._cache.num_blocks(replica_id) + self._tiers.num_blocks(replica_id)

    def add(self, replica_id: str, keys: Sequence[bytes], now: float) -> None:
        """Note that a prompt was sent to the replica at `now`, in seconds."""
        self._cache.add(replica_id, keys, now)
        if self._tiers.knows(replica_id):
            self._tiers.add(replica_id, keys, now)

    def report(self, replica_id: str, report: RoutingReport, taken_at: float) -> None:
        """Note what the replica's engine had at `taken_at`."""
        self._cache.report(
            replica_id,
            report.prefix_keys,
            taken_at,
            complete=report.all_prefixes,
            max_cached=report.max_cached_blocks,
        )
        if not report.tiers:
            self._tiers.forget(replica_id)
            return
        self._tiers.report(
            replica_id,
            [key for tier in report.tiers for key in tier.prefix_keys],
            taken_at,
            complete=all(tier.all_prefixes for tier in report.tiers),
            max_cached=sum(tier.num_blocks for tier in report.tiers),
        )

    def forget(self, replica_id: str) -> None:
        self._cache.forget(replica_id)
        self._tiers.forget(replica_id)

    def match(self, replica_id: str, keys: Sequence[bytes]) -> Found:
        """Return how many leading blocks of a prompt the replica has."""
        if not self._tiers.knows(replica_id):
            return Found(self._cache.match(replica_id, keys))
        cached, below = self._cache.of(replica_id), self._tiers.of(replica_id)
        num_loaded = 0
        for depth, key in enumerate(keys):
            if key not in cached:
                if key not in below:
                    return Found(depth, num_loaded)
                num_loaded += 1
        return Found(len(keys), num_loaded)

    def holders(self, keys: Sequence[bytes]) -> dict[str, Found]:
        """Return the replicas that have leading blocks of a prompt, and how many. Callable on any thread, like
        PrefixIndex.holders."""
        found = {name: Found(depth) for name, depth in self._cache.holders(keys).items()}
        for name in self._tiers.names() if keys else ():
            if (one := self.match(name, keys)).num_cached:
                found[name] = one
        return found
