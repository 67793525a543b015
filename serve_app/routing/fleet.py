"""Owns what a router knows of the engine replicas: their last reports, and what was sent to them since.
Never decides where a request goes, and never asks a replica; for one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.routing.engine_load import EngineLoad
from serve_app.routing.prefix_index import PrefixIndex
from serve_app.routing.stats import RoutingReport, decode, taken_at_s

FLIGHT_S = 0.1
"""A report is not trusted to count what was sent less than this before it: the request may have been on its way, or the
two machines' clocks apart. To count a request twice spreads load; to miss it would pile up load."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has to do."""

    num_requests: int = 0
    """Running and waiting."""
    num_queued_tokens: int = 0
    """Prompt tokens still to compute."""
    num_free_tokens: int | None = None
    """That its KV cache has room for; None if unknown."""


@dataclass(slots=True)
class _Sent:
    """A request that was sent, or is about to be, and has not ended."""

    replica_id: str
    num_tokens: int
    keys: tuple[bytes, ...]
    at: float


@dataclass(slots=True)
class _Replica:
    report: RoutingReport | None = None
    fresh: dict[str, _Sent] = field(default_factory=dict)
    """Open attempts that the report does not count, in order of time."""
    counted: dict[str, _Sent] = field(default_factory=dict)
    """Those that it does."""
    num_ended: int = 0
    """Requests that the report counts and that have ended since."""

    def num_queued_tokens(self, now: float) -> float:
        """Prompt tokens still to compute: the report's and the fresh ones, less what the engine computed meanwhile."""
        left, at, rate = 0.0, now, 0.0
        if self.report:
            left, at, rate = self.report.num_queued_tokens, self.report.taken_at_s, self.report.prefill_tokens_per_s
        for sent in self.fresh.values():
            left = max(left - rate * max(sent.at - at, 0), 0) + sent.num_tokens
            at = max(at, sent.at)
        return max(left - rate * max(now - at, 0), 0)


class Fleet:
    """Merges two views of each replica.

    A report counts everybody's requests, but it is as old as the period of reports. This router's own record counts
    its own requests only, but at once. A replica's load is its last report, plus what this router sent there since,
    less what it knows to have ended since, and less the prompt tokens that the engine has computed since if it is as
    fast as it says. Without a report it is what this router sent there and has not seen end.
    """

    def __init__(self, block_size: int, max_index_blocks: int) -> None:
        """`max_index_blocks` bounds the prefixes remembered of each replica, in KV blocks."""
        self._block_size = block_size
        self._index = PrefixIndex(max_index_blocks)
        self._replicas: dict[str, _Replica] = {}
        self._attempts: dict[str, _Sent | None] = {}  # None: opened, not placed yet

    def update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """The replicas that live, and the routing stats of each. The others are forgotten."""
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
        self._index.report(
            replica_id,
            report.prefix_keys,
            until,
            complete=report.all_prefixes,
            max_cached=report.max_cached_blocks,
        )

    def engine_load(self) -> EngineLoad | None:
        """Of all replicas that have reported, by their last reports; None if none has."""
        reports = [replica.report for replica in self._replicas.values() if replica.report is not None]
        num_blocks = sum(report.num_blocks for report in reports)
        if not num_blocks:
            return None
        held = sum(report.num_held_blocks for report in reports)
        return EngineLoad(held / num_blocks, sum(report.num_waiting for report in reports))

    def forget(self, replica_id: str) -> None:
        """The replica is gone, with its cache and with what was sent there."""
        self._index.forget(replica_id)
        if replica := self._replicas.pop(replica_id, None):
            for attempt in (*replica.fresh, *replica.counted):
                self._attempts[attempt] = None

    def load(self, replica_id: str, now: float) -> ReplicaLoad:
        """`now` is wall clock, in seconds, as are all times here."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return ReplicaLoad()
        num_queued_tokens = int(replica.num_queued_tokens(now))
        if (report := replica.report) is None:
            return ReplicaLoad(len(replica.fresh), num_queued_tokens)
        promised = sum(sent.num_tokens for sent in replica.fresh.values())
        return ReplicaLoad(
            num_requests=max(report.num_requests - replica.num_ended, 0) + len(replica.fresh),
            num_queued_tokens=num_queued_tokens,
            num_free_tokens=max(report.num_free_blocks * self._block_size - promised, 0),
        )

    def num_cached_tokens(self, replica_id: str, keys: Sequence[bytes]) -> int:
        """Leading tokens of a prompt that the replica is believed to have computed."""
        return self._index.match(replica_id, keys) * self._block_size

    # --- what this router sends: open, place as often as it takes, close ----------------------------------------------

    def open(self, attempt: str) -> None:
        """A request is looking for a replica."""
        self._attempts[attempt] = None

    def place(self, attempt: str, replica_id: str, num_tokens: int, keys: tuple[bytes, ...], now: float) -> None:
        """It goes to this replica, to compute `num_tokens`: from now on, other requests see it there.

        Ignored for an attempt that is not open, of whose end nobody would tell.
        """
        if attempt not in self._attempts:
            return
        self._withdraw(attempt)
        if (replica := self._replicas.get(replica_id)) is None:
            return
        self._attempts[attempt] = replica.fresh[attempt] = _Sent(replica_id, num_tokens, keys, now)
        self._index.add(replica_id, keys, now)

    def confirm(self, attempt: str, replica_id: str, now: float) -> None:
        """It was sent to this replica, wherever it was placed."""
        sent = self._attempts.get(attempt)
        if sent is not None and sent.replica_id != replica_id:
            self.place(attempt, replica_id, sent.num_tokens, sent.keys, now)

    def close(self, attempt: str) -> None:
        """It has ended in any way. Ignored for an unknown one."""
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
