"""Owns what a router knows about the engine replicas: their last reports, and what was sent to them since.
Never decides where a request goes, and never asks a replica. For use by a single thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.protocol import PrefillCosts
from serve_app.admission.fleet_forecast import EngineForecast
from serve_app.engines.engine_load import EngineLoad
from serve_app.routing.stats import RoutingReport, decode, taken_at_s
from serve_app.routing.tiered_index import NOTHING, Found, TieredIndex

FLIGHT_S = 0.1
"""A report is assumed not to count requests that were sent less than this before it: they may have been under way, or
the machines' clocks may differ. Counting a request twice spreads load; missing it would pile up load."""


class ReplicaLoad(NamedTuple):
    """A replica's work. A tuple for the same reason as a Candidate."""

    num_requests: int = 0
    """Running and waiting requests."""
    num_queued_tokens: int = 0
    """Prompt tokens that are still to be computed."""
    num_free_tokens: int | None = None
    """Tokens for which the KV cache has room; None if unknown."""


class PredictedLoad(NamedTuple):
    """A replica's work in time, with what more of it takes."""

    num_requests: int
    queued_s: float
    """Seconds until the prompts that were sent there are computed."""
    token_s: float
    pair_s: float
    num_free_tokens: int | None


@dataclass(slots=True)
class _Sent:
    """A request that was sent, or is about to be sent, and has not ended."""

    replica_id: str
    num_tokens: int
    """The prompt's tokens that must be computed there."""
    num_cached_tokens: int
    """Those before them."""
    num_loaded_tokens: int
    """The part of these that is only in a tier, so that it takes room in the KV cache."""
    keys: tuple[bytes, ...]
    at: float
    adapter: bytes = b""
    """The key of the request's adapter; b"" without an adapter."""


@dataclass(slots=True)
class _Replica:
    report: RoutingReport | None = None
    fresh: dict[str, _Sent] = field(default_factory=dict)
    """Open attempts that the report does not count yet, in order of time."""
    counted: dict[str, _Sent] = field(default_factory=dict)
    """Open attempts that the report counts."""
    num_ended: int = 0
    """How many requests that the report counts have ended since."""
    # The sums of the report and the fresh attempts. They are kept, because each request needs them for every replica.
    num_requests: int = 0
    num_promised_tokens: int = 0
    """The tokens of the fresh attempts that need room in the KV cache."""
    num_free_tokens: int | None = None
    """The number from the report."""
    left: float = 0.0
    """Prompt tokens that were still to be computed at `at`: those of the report and of the fresh attempts, less what
    the engine computed in between."""
    at: float = 0.0
    rate: float = 0.0
    costs: PrefillCosts | None = None
    """The report's; None if there is none, or its engine does not predict."""
    left_s: float = 0.0
    """The seconds that the work at `at` takes, if there are `costs`."""
    is_summed: bool = True
    """Whether the sums are those of the report and the fresh attempts. Many attempts may end before anybody asks."""

    def sum_up(self, block_size: int) -> None:
        """Compute the sums anew, after a new report or the end of attempts."""
        self.is_summed = True
        self.num_promised_tokens, self.num_requests = 0, 0
        self.left, self.at, self.rate, self.num_free_tokens = 0.0, 0.0, 0.0, None
        self.left_s, self.costs = 0.0, None
        if report := self.report:
            self.left, self.at, self.rate = report.num_queued_tokens, report.taken_at_s, report.prefill_tokens_per_s
            self.left_s, self.costs = report.queued_prefill_s or 0.0, report.prefill_costs
            self.num_requests = max(report.num_requests - self.num_ended, 0)
            self.num_free_tokens = report.num_free_blocks * block_size
        for sent in self.fresh.values():
            self.add(sent)

    def add(self, sent: _Sent) -> None:
        """Add a fresh attempt to the sums."""
        self.num_requests += 1
        self.num_promised_tokens += sent.num_tokens + sent.num_loaded_tokens
        self.left = self.num_queued_tokens(sent.at) + sent.num_tokens
        if self.costs is not None:
            start = sent.num_cached_tokens
            self.left_s = self.queued_s(sent.at) + self.costs.seconds(start, start + sent.num_tokens)
        self.at = max(self.at, sent.at)

    def holds(self, adapter: bytes) -> bool:
        """Whether the replica has the adapter, or will load it for a request that was sent there."""
        if self.report is not None and adapter in self.report.adapter_keys:
            return True
        return any(one.adapter == adapter for sent in (self.fresh, self.counted) for one in sent.values())

    def num_queued_tokens(self, now: float) -> float:
        """Estimate the prompt tokens still to be computed: `left`, less what the engine has computed since."""
        left = self.left - self.rate * (now - self.at) if now > self.at else self.left
        return left if left > 0 else 0.0

    def queued_s(self, now: float) -> float:
        """Estimate the seconds until those are computed: they pass by themselves."""
        left_s = self.left_s - (now - self.at) if now > self.at else self.left_s
        return left_s if left_s > 0 else 0.0

    def predicted(self, costs: PrefillCosts, now: float) -> PredictedLoad:
        free = self.num_free_tokens
        return PredictedLoad(
            self.num_requests,
            self.queued_s(now) if self.left_s else 0.0,
            costs.token_s,
            costs.pair_s,
            None if free is None else max(free - self.num_promised_tokens, 0),
        )


_NOBODY = _Replica()
"""Stands for a replica about which nothing is known."""


class Fleet:
    """Merges two views of each replica.

    A report counts everybody's requests, but may be as old as the period of reports. This router's own record counts
    only its own requests, but immediately. A replica's load is its last report, plus what this router has sent there
    since, less what it knows to have ended since, and less the prompt tokens that the engine has computed since at the
    speed that it reported. Without a report, it is what this router has sent there and has not seen end. Where an
    engine predicts times, the same is known in seconds.
    """

    def __init__(self, block_size: int, max_index_blocks: int) -> None:
        """`max_index_blocks`: the limit of the prefixes that are remembered for each replica, in KV blocks, and for its
        tiers again."""
        self._block_size = block_size
        self._index = TieredIndex(max_index_blocks)
        self._replicas: dict[str, _Replica] = {}
        self._attempts: dict[str, _Sent | None] = {}  # None: opened, not placed yet

    def update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the live replicas with the routing stats of each, and forget all others."""
        for replica_id in [known for known in self._replicas if known not in stats]:
            self.forget(replica_id)
        for replica_id, packed in stats.items():
            replica = self._replicas.setdefault(replica_id, _Replica())
            known = replica.report.taken_at_s if replica.report else None
            if taken_at_s(packed) != known and (report := decode(packed)):
                self._take(replica_id, replica, report)

    def _take(self, replica_id: str, replica: _Replica, report: RoutingReport) -> None:
        until = report.taken_at_s - FLIGHT_S
        replica.report = report
        replica.num_ended = 0
        for attempt, sent in list(replica.fresh.items()):
            if sent.at <= until:
                replica.counted[attempt] = replica.fresh.pop(attempt)
        replica.sum_up(self._block_size)
        self._index.report(replica_id, report, until)

    def engine_load(self) -> EngineLoad | None:
        """Compute the load of all replicas that have reported, by their last reports; None if none has."""
        reports = [replica.report for replica in self._replicas.values() if replica.report is not None]
        num_blocks = sum(report.num_blocks for report in reports)
        if not num_blocks:
            return None
        held = sum(report.num_held_blocks for report in reports)
        return EngineLoad(held / num_blocks, sum(report.num_waiting for report in reports))

    def forecasts(self) -> tuple[EngineForecast, ...]:
        """Return what the replicas predicted in their last reports; nothing if one of them did not predict."""
        found = []
        for name, replica in self._replicas.items():
            report = replica.report
            if report is None or report.prefill_costs is None:
                return ()
            least = report.idle_prefill_costs or PrefillCosts(0.0, 0.0)
            found.append(EngineForecast(name, report.taken_at_s, report.queued_prefill_s or 0.0, least))
        return tuple(found)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is gone, with its cache and what was sent there."""
        self._index.forget(replica_id)
        if replica := self._replicas.pop(replica_id, None):
            for attempt in (*replica.fresh, *replica.counted):
                self._attempts[attempt] = None

    def load(self, replica_id: str, now: float) -> ReplicaLoad:
        """Return a replica's load. `now`: wall clock in seconds, like all times here."""
        return self.loads((replica_id,), now)[0]

    def loads(self, replica_ids: Iterable[str], now: float) -> list[ReplicaLoad]:
        """Return the load of each replica, in the given order."""
        replicas = map(self._summed, replica_ids)
        return [
            ReplicaLoad(
                replica.num_requests,
                int(replica.num_queued_tokens(now)) if replica.left else 0,
                None if (free := replica.num_free_tokens) is None else max(free - replica.num_promised_tokens, 0),
            )
            for replica in replicas
        ]

    def predicted_loads(self, replica_ids: Iterable[str], now: float) -> list[PredictedLoad] | None:
        """Return the load of each replica in time; None if one of them has not reported its costs. Then no two can be
        compared by time: a rate of tokens measured over a minute, and only under load, is no prediction beside one."""
        found = []
        for replica_id in replica_ids:
            replica = self._summed(replica_id)
            if (costs := replica.costs) is None:
                return None
            found.append(replica.predicted(costs, now))
        return found

    def _summed(self, replica_id: str) -> _Replica:
        """Return what is known of a replica, with its sums."""
        replica = self._replicas.get(replica_id, _NOBODY)
        if not replica.is_summed:
            replica.sum_up(self._block_size)
        return replica

    def cached_tokens(self, replica_id: str, keys: Sequence[bytes]) -> Found:
        """Estimate how many leading tokens of a prompt the replica need not compute."""
        return self._in_tokens(self._index.match(replica_id, keys))

    def holders(self, keys: Sequence[bytes]) -> dict[str, Found]:
        """Return the `cached_tokens` of the replicas that have any."""
        return {name: self._in_tokens(found) for name, found in self._index.holders(keys).items()}

    def _in_tokens(self, found: Found) -> Found:
        return Found(found.num_cached * self._block_size, found.num_loaded * self._block_size)

    def holds_adapter(self, replica_id: str, adapter: bytes) -> bool:
        """Whether the replica probably has the adapter with that key in memory."""
        return self._replicas.get(replica_id, _NOBODY).holds(adapter)

    # --- what this router sends: open, place as often as necessary, close ---------------------------------------------

    def open(self, attempt: str) -> None:
        """Begin an attempt: a request that looks for a replica."""
        self._attempts[attempt] = None

    def place(
        self,
        attempt: str,
        replica_id: str,
        num_tokens: int,
        keys: tuple[bytes, ...],
        now: float,
        adapter: bytes = b"",
        *,
        cached: Found = NOTHING,
    ) -> None:
        """Count an attempt at a replica, with `num_tokens` to compute after those that are `cached`, so that other
        requests take it into account.

        Ignored for an attempt that is not open, because its end would not be reported.
        """
        if attempt not in self._attempts:
            return
        self._withdraw(attempt)
        if (replica := self._replicas.get(replica_id)) is None:
            return
        sent = _Sent(replica_id, num_tokens, *cached, keys, now, adapter)
        self._attempts[attempt] = replica.fresh[attempt] = sent
        if replica.is_summed:
            replica.add(sent)
        self._index.add(replica_id, keys, now)

    def confirm(self, attempt: str, replica_id: str, now: float) -> None:
        """Note to which replica an attempt was really sent."""
        sent = self._attempts.get(attempt)
        if sent is not None and sent.replica_id != replica_id:
            cached = Found(sent.num_cached_tokens, sent.num_loaded_tokens)
            self.place(attempt, replica_id, sent.num_tokens, sent.keys, now, sent.adapter, cached=cached)

    def close(self, attempt: str) -> None:
        """End an attempt, whatever its outcome. Ignored for an unknown one."""
        if attempt in self._attempts:
            self._withdraw(attempt)
            del self._attempts[attempt]

    def _withdraw(self, attempt: str) -> None:
        if (sent := self._attempts[attempt]) is None:
            return
        self._attempts[attempt] = None
        replica = self._replicas[sent.replica_id]
        if replica.fresh.pop(attempt, None) is None:
            del replica.counted[attempt]
            replica.num_ended += 1
        replica.is_summed = False
