"""Connects Ray Serve's routing to ours: has the class that Serve loads into every process that calls engines.
Never decides: placement does. Serve pickles this module by value, so state that it shares with others is in theirs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.config import EngineConfig
from serve_app.admission.fleet_forecast import FleetForecast, set_fleet_forecast
from serve_app.engines import liveness
from serve_app.engines.engine_call import EngineCall
from serve_app.engines.engine_count import num_engines, set_num_engines
from serve_app.engines.engine_load import set_engine_load
from serve_app.metrics import overlap
from serve_app.routing.chooser import Chooser
from serve_app.routing.placement import Candidate, two_choices
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

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._fleet.update({replica.replica_id.unique_id: replica.routing_stats for replica in replicas})
        self._publish_fleet()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._fleet.forget(replica_id.unique_id)
        self._publish_fleet()

    def _publish_fleet(self) -> None:
        liveness.set_engines(frozenset(replica_id.unique_id for replica_id in self.curr_replicas), self._name)
        set_num_engines(len(self.curr_replicas), self._name)
        set_engine_load(self._fleet.engine_load(), self._name)
        forecasts = self._fleet.forecasts()
        forecast = FleetForecast(forecasts, self._chooser.most_cached) if forecasts else None
        set_fleet_forecast(forecast, self._name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas. Serve tries them until one takes the request; if none does, it waits and asks again."""
        if pending_request is not None:  # otherwise Serve would ask again at once, as long as all are full
            pending_request.routing_context.should_backoff = True
        silent = liveness.silent_engines(self._name)  # if there are no others, the request waits here
        candidate_replicas = [one for one in candidate_replicas if one.replica_id.unique_id not in silent]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ready = {replica.replica_id.unique_id for replica in self.select_available_replicas(candidate_replicas)}
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if pending_request is not None and isinstance(call, EngineCall):
            ranks = self._place(pending_request.metadata.internal_request_id, call, list(by_id), by_id.keys() - ready)
        else:
            ranks = two_choices([Candidate(name, full=name not in ready) for name in by_id], self._random)
        return [[by_id[name] for name in names] for names in ranks]

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
