"""Connects Ray Serve's routing to ours: has the class that Serve loads into every process that calls engines.
Never decides: placement does. Serve pickles this module by value, so state that it shares with others is in theirs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.config import EngineConfig
from serve_app.admission.fleet_forecast import FleetForecast, set_fleet_forecast
from serve_app.engines import liveness, versions
from serve_app.engines.engine_call import EngineCall
from serve_app.engines.engine_count import num_engines, set_num_engines
from serve_app.engines.engine_load import set_engine_load
from serve_app.metrics import overlap
from serve_app.routing.chooser import Chooser
from serve_app.routing.placement import Candidate, two_choices
from serve_app.routing.stats import version_of
from serve_app.settings.routing import RoutingSettings

__all__ = ["EngineRouter", "num_engines", "router_config"]


def router_config(routing: RoutingSettings, engine: EngineConfig) -> RequestRouterConfig:
    """Make Serve's configuration for routing calls to the engine deployment."""
    if not engine.enable_prefix_caching:
        routing = routing.model_copy(update={"prefix_blocks": 0})
    return RequestRouterConfig(
        request_router_class=EngineRouter,
        request_router_kwargs={"block_size": engine.block_size, "routing": routing.model_dump(mode="json")},
        request_routing_stats_period_s=routing.stats_period_s,
    )


class EngineRouter(RequestRouter):  # type: ignore[misc]
    """Places engine calls by session, cached prefix and load, and all other calls by the shorter of two queues.

    All of it runs on the router's event loop, and nothing in it waits for another process.
    """

    def initialize_state(
        self, *, block_size: int, routing: Mapping[str, Any] | None = None, random: Random | None = None
    ) -> None:
        """Initialize; called by Serve with the `request_router_kwargs`. `block_size`: that of the engines, in
        tokens."""
        self._random = random or Random()
        self._chooser = Chooser(RoutingSettings(**(routing or {})), block_size, self._random)
        self._fleet = self._chooser.fleet
        self._name = self._deployment_id.name
        self._expected: dict[str, dict[str, int]] = {}  # attempt -> replica -> prompt tokens cached there, if any
        self._revision = self._announced = 0  # of what is known of versions, when the rest was made of it
        self._foreign: frozenset[str] = frozenset()
        self._untold: frozenset[str] = frozenset()
        self._ours: dict[ReplicaID, RunningReplica] = {}

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The engines of this process's model, which also a broadcast goes to. While a changed config is rolled out
        there may be others, which do not count."""
        return self._ours

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        for replica in replicas:
            if (version := version_of(replica.routing_stats)) is not None:
                versions.tell(replica.replica_id.unique_id, version, self._name)
        super().update_replicas(replicas)
        self._know_versions()
        stats = {replica.replica_id.unique_id: replica.routing_stats for replica in self._ours.values()}
        self._fleet.update(stats)
        self._publish_fleet()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._fleet.forget(replica_id.unique_id)
        self._know_versions()
        self._publish_fleet()

    def _know_versions(self) -> None:
        """Sort the replicas by what is known of them."""
        self._revision, named = versions.revision(self._name), {one.unique_id: one for one in self._replicas}
        self._foreign = frozenset(name for name in named if versions.is_foreign(name, self._name))
        takes_any = versions.wanted(self._name) is None
        told = () if takes_any else (name for name in named if versions.version_of(name, self._name) is None)
        self._untold = frozenset(told)
        versions.set_replaced(bool(named) and len(self._foreign) == len(named), self._name)
        self._ours = {key: one for key, one in self._replicas.items() if key.unique_id not in self._foreign}

    def _publish_fleet(self) -> None:
        engines = frozenset(replica_id.unique_id for replica_id in self.curr_replicas)
        joined = bool(engines - liveness.engines(self._name))
        liveness.set_engines(engines, self._name)
        set_num_engines(len(engines), self._name, joined=joined)
        set_engine_load(self._fleet.engine_load(), self._name)
        forecasts = self._fleet.forecasts()
        forecast = FleetForecast(forecasts, self._chooser.most_cached) if forecasts else None
        set_fleet_forecast(forecast, self._name)
        if versions.wanted(self._name) is not None and self._announced != self._revision:
            self._announced = self._revision
            versions.announce()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas. Serve tries them until one takes the request; if none does, it waits and asks again."""
        if pending_request is not None:  # otherwise Serve would ask again at once, as long as all are full
            pending_request.routing_context.should_backoff = True
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if versions.revision(self._name) != self._revision:
            self._know_versions()
            self._publish_fleet()
        # If there are no others, the request waits here.
        hidden = liveness.silent_engines(self._name) | self._foreign
        if isinstance(call, EngineCall):
            hidden |= self._unfit(call)
        candidate_replicas = [one for one in candidate_replicas if one.replica_id.unique_id not in hidden]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ready = {replica.replica_id.unique_id for replica in self.select_available_replicas(candidate_replicas)}
        if pending_request is not None and isinstance(call, EngineCall):
            ranks = self._place(pending_request.metadata.internal_request_id, call, list(by_id), by_id.keys() - ready)
        else:
            ranks = self._any_of(by_id, ready)
        return [[by_id[name] for name in names] for names in ranks]

    def _unfit(self, call: EngineCall) -> frozenset[str]:
        """Return the engines that must not take a request: those that have not told what they are, and for an answer
        that another engine began, those with other files."""
        if not call.files:
            return self._untold
        found = ((name.unique_id, versions.version_of(name.unique_id, self._name)) for name in self._ours)
        return self._untold.union(name for name, version in found if version and version.files != call.files)

    def _any_of(self, names: Iterable[str], ready: Container[str]) -> list[list[str]]:
        """Rank the engines for a call that computes nothing: first those of this process's own settings, as it may ask
        for what follows from them."""
        own: list[Candidate] = []
        others: list[Candidate] = []
        for name in names:
            (own if versions.is_own(name, self._name) else others).append(Candidate(name, full=name not in ready))
        return [*two_choices(own, self._random), *two_choices(others, self._random)]

    def _place(self, attempt: str, call: EngineCall, names: list[str], full: set[str]) -> list[list[str]]:
        choice = self._chooser.place(
            attempt, call.submission, names, time.time(), session=call.session, avoid=call.avoid, full=full
        )
        self._expected[attempt] = choice.num_cached_tokens
        return choice.ranks

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Route one attempt, from its beginning to its end, with Serve's own method.

        Each attempt gets an id of its own. Serve gives all calls of one HTTP request the same id, by which its base
        class finds the call for a routed replica: of two such calls that wait at the same time, one would wait forever
        (seen with 2.60). Also, the end of a rejected attempt must not be taken for the end of its retry.
        """
        attempt = uuid.uuid4().hex
        pending_request.metadata = replace(pending_request.metadata, internal_request_id=attempt)
        self._fleet.open(attempt)
        try:
            chosen: RunningReplica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._fleet.close(attempt)
            raise
        finally:
            expected = self._expected.pop(attempt, None)
        if expected is not None and not is_retry:  # a retry was already counted
            num_tokens = len(pending_request.args[0].submission.prompt_token_ids)
            overlap.add(num_tokens, expected.get(chosen.replica_id.unique_id, 0), self._name)
        self._fleet.confirm(attempt, chosen.replica_id.unique_id, time.time())
        if pending_request.args and isinstance(call := pending_request.args[0], EngineCall):
            liveness.place_call(call.stream_id, chosen.replica_id.unique_id, self._name)
        return chosen

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Close an attempt; called by Serve once for each attempt that got a replica, whatever its outcome."""
        self._fleet.close(internal_request_id)
