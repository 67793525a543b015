"""Contracts of the router inside Ray Serve's own routing loop, with replicas that are not there. Long: every way
in which an attempt can end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from engine.config import EngineConfig
from engine.prefix import extend_chain
from engine.protocol import AdapterRef, PrefillCosts, SamplingParams, Submission
from serve_app.admission.fleet_forecast import fleet_forecast
from serve_app.engines import engine_count, liveness, versions
from serve_app.engines.engine_call import ChannelAddress, EngineCall
from serve_app.engines.engine_load import EngineLoad, engine_load
from serve_app.engines.versions import EngineVersion
from serve_app.metrics import overlap
from serve_app.routing.router import EngineRouter, num_engines, router_config
from serve_app.routing.stats import encode
from serve_app.settings.routing import RoutingSettings
from tests.support.reports import snapshot, stats

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
DEPLOYMENT = DeploymentID(name="Engine", app_name="app")
NOWHERE = ChannelAddress("tcp://127.0.0.1:1", b"", b"", b"")
BLOCK_SIZE = 4
FULL = 10
PROMPT = tuple(range(100))


class FakeReplica(RunningReplica):  # type: ignore[misc]
    """What a router sees of a replica; it takes requests while `queue_len` is below FULL."""

    def __init__(self, name: str, reported: dict[str, Any] | None = None) -> None:
        self._id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self._reported = reported or {}
        self.queue_len = 0

    @property
    def replica_id(self) -> ReplicaID:
        return self._id

    @property
    def routing_stats(self) -> dict[str, Any]:
        return self._reported

    @property
    def max_ongoing_requests(self) -> int:
        return FULL

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


@pytest.fixture(autouse=True)
def unknown_number_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_count, "_known", {})
    monkeypatch.setattr(liveness, "_deployments", {})
    monkeypatch.setattr(versions, "_deployments", {})
    monkeypatch.setattr(versions, "_listeners", [])


def make_router(seed: int = 0, deployment: DeploymentID = DEPLOYMENT, **routing: Any) -> EngineRouter:
    router = EngineRouter(
        deployment_id=deployment,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        self_node_id="node",
        prefer_local_node_routing=False,
        initial_backoff_s=0.001,
        max_backoff_s=0.01,
    )
    router.initialize_state(block_size=BLOCK_SIZE, routing=routing, random=Random(seed))
    return router


def engine_call(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> EngineCall:
    return EngineCall(Submission("r", prompt, SamplingParams()), stream_id=1, channel=NOWHERE, **fields)


def pending(*args: Any, request_id: str = "http request") -> PendingRequest:
    """Make a pending request as Serve does: all calls of one HTTP request have its id."""
    return PendingRequest(
        args=list(args), kwargs={}, metadata=RequestMetadata(request_id=request_id, internal_request_id=request_id)
    )


async def route(router: EngineRouter, request: PendingRequest, *, is_retry: bool = False) -> str:
    async with asyncio.timeout(20):
        replica = await router._choose_replica_for_request(request, is_retry=is_retry)
    return str(replica.replica_id.unique_id)


def end(router: EngineRouter, request: PendingRequest, name: str) -> None:
    """Report an end as Serve does, once for each attempt that got a replica."""
    router.on_request_completed(ReplicaID(name, DEPLOYMENT), request.metadata.internal_request_id)


def loads(router: EngineRouter, *names: str) -> list[int]:
    return [router._fleet.load(name, now=0).num_requests for name in names]


# --- where requests go -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(engine_call(),), ()], ids=["request", "control call"])
async def test_nothing_goes_to_a_silent_engine_until_it_is_heard_of_again(args: tuple[Any, ...]) -> None:
    router = make_router()
    router.update_replicas([FakeReplica(name) for name in "abc"])
    liveness.set_silent_engines(frozenset("ab"))
    assert {await route(router, pending(*args)) for _ in range(20)} == {"c"}
    liveness.set_silent_engines(frozenset("bc"))
    assert {await route(router, pending(*args)) for _ in range(20)} == {"a"}


async def test_while_all_engines_are_silent_a_request_waits_for_the_first_that_is_heard_of() -> None:
    router = make_router()
    router.update_replicas([FakeReplica(name) for name in "ab"])
    liveness.set_silent_engines(frozenset("ab"))
    waiting = asyncio.ensure_future(route(router, pending(engine_call())))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    liveness.set_silent_engines(frozenset("a"))
    assert await waiting == "b"


async def test_the_channel_learns_which_engines_there_are_and_where_each_open_call_went() -> None:
    router = make_router()
    router.update_replicas([FakeReplica(name) for name in "ab"])
    assert liveness.engines() == {"a", "b"}
    liveness.open_call(1)
    assert liveness.placed_at(1) is None
    name = await route(router, pending(engine_call()))
    assert liveness.placed_at(1) == name
    assert liveness.engines_with_calls() == {name}
    liveness.close_call(1)
    await route(router, pending(engine_call()))  # its reader left meanwhile
    assert not liveness.engines_with_calls()
    router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    assert liveness.engines() == {"b"}


async def test_requests_with_one_prefix_go_to_one_replica_while_its_load_allows() -> None:
    router = make_router()
    router.update_replicas([FakeReplica(name) for name in "abc"])
    chosen = set()
    for i in range(20):
        request = pending(engine_call((*PROMPT, i)))
        chosen.add(name := await route(router, request))
        end(router, request, name)
    assert len(chosen) == 1


async def test_what_is_expected_in_the_chosen_engines_cache_is_counted_once_a_call() -> None:
    router = make_router()
    router.update_replicas([FakeReplica(name) for name in "abc"])
    before = overlap.totals()
    for is_retry in (False, False, True):  # a call that was turned away looks again
        request = pending(engine_call())
        end(router, request, await route(router, request, is_retry=is_retry))
    await route(router, pending())  # a call that computes nothing
    prompt_tokens, overlap_tokens = (after - first for after, first in zip(overlap.totals(), before, strict=True))
    assert prompt_tokens == 2 * len(PROMPT)
    assert overlap_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    assert router._expected == {}


async def test_requests_with_one_prefix_spread_once_its_holder_has_more_to_do_than_the_prefix_saves() -> None:
    router = make_router(slack_tokens=0)
    router.update_replicas([FakeReplica(name) for name in "abc"])
    counts = Counter([await route(router, pending(engine_call((*PROMPT, i)))) for i in range(30)])
    assert len(counts) == 3
    assert max(counts.values()) <= 1.25 * 10 + 2


async def test_requests_that_arrive_at_once_see_each_other() -> None:
    """If each counted only when Serve says that it was sent, all would go to the replica with the best report."""
    router = make_router()
    idle, busy = (stats(1.0, queued=queued) for queued in (0, 500))
    router.update_replicas([FakeReplica("a", idle), FakeReplica("b", busy)])
    requests = [pending(engine_call(tuple(range(1000 * i, 1000 * i + 100))), request_id=str(i)) for i in range(20)]
    counts = Counter(await asyncio.gather(*(route(router, request) for request in requests)))
    assert counts["a"] > counts["b"] >= 5


async def test_a_session_stays_at_its_replica() -> None:
    router = make_router()
    router.update_replicas([FakeReplica(name) for name in "abcd"])
    homes = set()
    for i in range(10):
        request = pending(engine_call(tuple(range(1000 * i, 1000 * i + 50)), session="s"))
        homes.add(name := await route(router, request))
        end(router, request, name)
    assert len(homes) == 1


async def test_requests_of_an_adapter_go_where_it_was_sent_and_reported_and_spill_over_when_that_is_hot() -> None:
    router = make_router(adapter_tokens=300, slack_tokens=100_000)
    router.update_replicas([FakeReplica(name) for name in "abcdef"])
    adapter = AdapterRef("x", "/x", "0f" * 16)

    def asked(i: int) -> PendingRequest:
        call = engine_call(tuple(range(1000 * i, 1000 * i + 50)))
        return pending(replace(call, submission=replace(call.submission, adapter=adapter)))

    first = await route(router, asked(0))
    assert {await route(router, asked(i)) for i in (1, 2)} == {first}, (
        "50 tokens of each, and 64 for itself: less than 300"
    )
    assert {await route(router, asked(i)) for i in range(3, 12)} - {first}, "and it has more to do than that"
    router = make_router()
    holding = encode(snapshot(), (), limit=9, prefill_tokens_per_s=0, taken_at_s=1.0, adapters=[adapter.digest])
    router.update_replicas([*(FakeReplica(name, stats(1.0)) for name in "abcde"), FakeReplica("f", holding)])
    assert await route(router, asked(0)) == "f"


async def test_a_replica_that_the_request_failed_on_is_avoided() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    assert {await route(router, pending(engine_call(avoid=("a",)))) for _ in range(10)} == {"b"}


async def test_a_call_that_is_no_request_goes_to_any_replica_and_leaves_no_trace() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    assert {await route(router, pending()) for _ in range(30)} == {"a", "b"}
    assert loads(router, "a", "b") == [0, 0]


async def test_a_report_of_an_engine_moves_requests_away_from_it() -> None:
    router = make_router()
    busy = stats(1.0, requests=90, queued=50_000)
    router.update_replicas([FakeReplica("a", busy), FakeReplica("b", {})])
    assert {await route(router, pending(engine_call((i, *PROMPT)))) for i in range(10)} == {"b"}


# --- engines of several versions --------------------------------------------------------------------------------------

OURS, EARLIER, FOREIGN = EngineVersion("m", "2", "f"), EngineVersion("m", "1", "f"), EngineVersion("other", "3", "f")


def is_a(version: EngineVersion) -> dict[str, Any]:
    """Return the first report of an engine of that version."""
    return encode(snapshot(), (), limit=9, prefill_tokens_per_s=0, taken_at_s=1.0, version=version)


@pytest.mark.parametrize("args", [(engine_call(),), ()], ids=["request", "control call"])
async def test_an_engine_of_another_model_is_none_of_the_engines(args: tuple[Any, ...]) -> None:
    """Regression: streams continued on the other model, and new requests went to it with their own tokenizer's ids."""
    versions.want(OURS)
    router = make_router()
    told = {"a": OURS, "b": EARLIER, "c": FOREIGN, "d": FOREIGN}
    router.update_replicas([FakeReplica(name, is_a(version)) for name, version in told.items()])
    assert {await route(router, pending(*args)) for _ in range(20)} <= {"a", "b"}
    assert (num_engines(), liveness.engines()) == (2, {"a", "b"})
    assert {one.unique_id for one in router.curr_replicas} == {"a", "b"}, "to which a broadcast goes"
    assert engine_load() == EngineLoad(0, 0)
    assert not versions.is_replaced()


async def test_with_engines_of_another_model_alone_a_call_waits_and_new_requests_are_refused() -> None:
    versions.want(OURS)
    router = make_router()
    router.update_replicas([FakeReplica("a", is_a(FOREIGN))])
    assert (num_engines(), versions.is_replaced()) == (0, True)
    waiting = asyncio.ensure_future(route(router, pending(engine_call())))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    router.update_replicas([FakeReplica("a", is_a(FOREIGN)), FakeReplica("b", is_a(EARLIER))])
    assert await waiting == "b"
    assert (num_engines(), versions.is_replaced()) == (1, False)
    router.on_replica_actor_died(ReplicaID("b", DEPLOYMENT))
    assert (num_engines(), versions.is_replaced()) == (0, True)
    router.update_replicas([])
    assert not versions.is_replaced(), "one may start"


async def test_an_engine_that_has_not_told_what_it_is_gets_calls_and_no_request() -> None:
    versions.want(OURS)
    router = make_router()
    router.update_replicas([FakeReplica("a")])
    assert (num_engines(), await route(router, pending())) == (1, "a")
    waiting = asyncio.ensure_future(route(router, pending(engine_call())))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    versions.tell("a", OURS)  # it has answered a call, before its first report
    assert await waiting == "a"


async def test_an_answer_continues_only_where_the_model_has_the_same_files() -> None:
    versions.want(OURS)
    router = make_router()
    told = {"a": replace(OURS, files="g"), "b": EARLIER, "c": FOREIGN}
    router.update_replicas([FakeReplica(name, is_a(version)) for name, version in told.items()])
    assert {await route(router, pending(engine_call(files="f"))) for _ in range(10)} == {"b"}
    assert {await route(router, pending(engine_call((i, *PROMPT)))) for i in range(20)} == {"a", "b"}


async def test_calls_that_compute_nothing_go_to_engines_of_the_own_settings_first() -> None:
    versions.want(OURS)
    router = make_router()
    told = {"a": EARLIER, "b": OURS, "c": EARLIER}
    replicas = {name: FakeReplica(name, is_a(version)) for name, version in told.items()}
    router.update_replicas(list(replicas.values()))
    assert {await route(router, pending()) for _ in range(10)} == {"b"}
    replicas["b"].queue_len = FULL
    router.on_new_queue_len_info(ReplicaID("b", DEPLOYMENT), FULL)
    assert await route(router, pending()) in {"a", "c"}


async def test_news_of_versions_are_told_once_the_engines_are_known() -> None:
    versions.want(OURS)
    heard: list[frozenset[str]] = []
    versions.on_news(lambda: heard.append(liveness.engines()))
    router = make_router()
    router.update_replicas([FakeReplica("a", is_a(EARLIER))])
    router.update_replicas([FakeReplica("a", is_a(EARLIER))])
    router.update_replicas([FakeReplica("b", is_a(OURS))])  # as many as before
    assert heard == [{"a"}, {"b"}]


# --- how an attempt ends ---------------------------------------------------------------------------------------------


async def test_two_calls_of_one_http_request_that_wait_at_once_are_both_routed() -> None:
    """Regression: Serve gives both the same id, and its base class then never fulfils the second one,
    which tried again for ever."""
    router = make_router()
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    async with asyncio.timeout(20):
        chosen = await asyncio.gather(*(route(router, pending(engine_call())) for _ in range(5)))
    assert set(chosen) <= {"a", "b"}


async def test_the_end_of_a_request_takes_it_off_its_replica() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a")])
    request = pending(engine_call())
    name = await route(router, request)
    assert loads(router, "a") == [1]
    end(router, request, name)
    end(router, pending(), name)  # a broadcast's end: its id was never announced
    assert loads(router, "a") == [0]


async def test_the_end_of_a_rejected_attempt_does_not_end_its_retry() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a")])
    request = pending(engine_call())
    await route(router, request)
    rejected = request.metadata.internal_request_id
    await route(router, request, is_retry=True)
    router.on_request_completed(ReplicaID("a", DEPLOYMENT), rejected)
    assert loads(router, "a") == [1]
    end(router, request, "a")
    assert loads(router, "a") == [0]


async def test_a_request_that_is_cancelled_while_it_waits_leaves_no_trace() -> None:
    router = make_router()
    replica = FakeReplica("a")
    replica.queue_len = FULL
    router.update_replicas([replica])
    waiting = asyncio.ensure_future(route(router, pending(engine_call())))
    async with asyncio.timeout(20):
        while loads(router, "a") == [0]:
            await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert loads(router, "a") == [0]
    assert router._fleet._attempts == {}


async def test_a_request_counts_where_it_went_when_the_replica_that_was_best_for_it_is_full() -> None:
    router = make_router()
    best, other = FakeReplica("a"), FakeReplica("b", stats(1.0, queued=900))
    best.queue_len = FULL  # which the router does not know yet
    router._replica_queue_len_cache.update(other.replica_id, 0)
    router.update_replicas([best, other])
    assert await route(router, pending(engine_call())) == "b"
    assert loads(router, "a", "b") == [0, 1]


# --- full replicas, and none -----------------------------------------------------------------------------------------


async def test_replicas_that_are_known_to_be_full_come_last() -> None:
    router = make_router()
    replicas = [FakeReplica(name) for name in "abc"]
    router.update_replicas(replicas)
    for replica, queue_len in zip(replicas, (FULL, FULL, FULL - 1), strict=True):
        router._replica_queue_len_cache.update(replica.replica_id, queue_len)
    for args in ((engine_call(),), ()):
        ranks = await router.choose_replicas(replicas, pending(*args))
        names = [sorted(replica.replica_id.unique_id for replica in rank) for rank in ranks]
        assert names == [["c"], ["a", "b"]]


@pytest.mark.parametrize("args", [(engine_call(),), ()])
async def test_while_all_are_full_a_request_waits_and_is_routed_once_one_is_not(args: tuple[Any, ...]) -> None:
    """Without `should_backoff` Serve asks again at once, and the router's loop would do nothing else."""
    router = make_router()
    replicas = [FakeReplica("a"), FakeReplica("b")]
    for replica in replicas:
        replica.queue_len = FULL
    router.update_replicas(replicas)
    request = pending(*args)
    waiting = asyncio.ensure_future(route(router, request))
    async with asyncio.timeout(20):
        while not router.num_routing_tasks_in_backoff:
            await asyncio.sleep(0)
    assert request.routing_context.should_backoff
    assert not waiting.done()
    replicas[1].queue_len = 0
    assert await waiting == "b"


async def test_a_request_that_came_before_any_replica_is_routed_when_one_comes() -> None:
    router = make_router()
    router.update_replicas([])
    waiting = asyncio.ensure_future(route(router, pending(engine_call())))
    await asyncio.sleep(0)
    router.update_replicas([FakeReplica("a")])
    assert await waiting == "a"


async def test_a_dead_replica_is_forgotten_at_once() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    name = await route(router, pending(engine_call()))
    router.on_replica_actor_died(ReplicaID(name, DEPLOYMENT))
    assert loads(router, "a", "b") == [0, 0]
    assert num_engines() == 1
    assert await route(router, pending(engine_call())) != name


async def test_a_replica_that_left_is_forgotten_with_the_update() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a")])
    await route(router, pending(engine_call()))
    router.update_replicas([FakeReplica("b")])
    assert loads(router, "a") == [0]
    assert await route(router, pending(engine_call())) == "b"


# --- the number of engines -------------------------------------------------------------------------------------------


async def test_the_number_of_engines_is_unknown_until_serve_tells_it() -> None:
    router = make_router()
    assert num_engines() is None
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    assert num_engines() == 2
    router.update_replicas([])
    assert num_engines() == 0


async def test_waiting_requests_are_told_of_an_engine_that_comes_as_another_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number is the same, and the place that is free is another one."""
    told: list[int | None] = []
    monkeypatch.setattr(engine_count, "_listeners", [lambda: told.append(num_engines())])
    router = make_router()
    for names in ("ab", "ab", "bc", "c", "c"):
        router.update_replicas([FakeReplica(name) for name in names])
    assert told == [2, 2, 1]


async def test_the_routers_of_several_deployments_keep_what_they_know_apart() -> None:
    """A process that calls several models' engines has a router for each. Calls are numbered by each channel's end, so
    that two of them have the same number."""
    other = DeploymentID(name="Engine-b", app_name="app")
    one, two = make_router(), make_router(deployment=other)
    one.update_replicas([FakeReplica("a"), FakeReplica("b")])
    two.update_replicas([FakeReplica("c", stats(4.0, requests=9, waiting=8, free_blocks=75))])
    assert (num_engines(), num_engines("Engine-b")) == (2, 1)
    assert (liveness.engines(), liveness.engines("Engine-b")) == ({"a", "b"}, {"c"})
    assert (engine_load(), engine_load("Engine-b")) == (None, EngineLoad(0.25, 8))
    liveness.open_call(1)
    liveness.open_call(1, "Engine-b")
    before = overlap.totals()
    assert await route(two, pending(replace(engine_call(), stream_id=1))) == "c"
    assert (liveness.placed_at(1), liveness.placed_at(1, "Engine-b")) == (None, "c")
    assert overlap.totals() == before
    assert overlap.totals("Engine-b")[0] == len(PROMPT)
    liveness.set_silent_engines(frozenset("c"))
    assert await route(two, pending(engine_call())) == "c", "another deployment's engine of that name is silent"


async def test_the_engines_load_is_what_they_report_and_none_without_them() -> None:
    router = make_router()
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    assert engine_load() is None
    router.update_replicas([FakeReplica("a", stats(4.0, requests=9, waiting=8, free_blocks=75)), FakeReplica("b")])
    assert engine_load() == EngineLoad(0.25, 8)
    router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    assert engine_load() is None


async def test_the_gate_is_told_what_the_engines_predict_if_all_do() -> None:
    router = make_router()
    costs = PrefillCosts(0.001, 0.0)
    router.update_replicas([FakeReplica("a", stats(4.0, queued_s=2.0, costs=costs)), FakeReplica("b")])
    assert fleet_forecast() is None
    router.update_replicas([FakeReplica("a", stats(5.0, queued_s=2.0, costs=costs))])
    known = fleet_forecast()
    assert known is not None
    assert known.wait_s(6.0) == 1.0
    router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    assert fleet_forecast() is None


def test_the_router_that_serve_unpickles_counts_engines_where_the_ingress_reads_them() -> None:
    """Serve pickles the router's module by value,
    so a global of that module would be a different one in each process."""
    pickled = router_config(RoutingSettings(), EngineConfig()).get_serialized_request_router_cls()
    code = """
import sys, pickle
cls = pickle.loads(sys.stdin.buffer.read())
from serve_app.routing.router import EngineRouter, num_engines
assert cls is not EngineRouter, "if Serve imports it by name now, engine_count can move into the router"
import asyncio
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
async def main():
    router = cls(deployment_id=DeploymentID("Engine", "app"), handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state(block_size=16)
    router.update_replicas([])
    print(num_engines())
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, cwd=ROOT, timeout=120)
    assert done.stdout.decode().split() == ["0"], done.stderr.decode()


# --- settings, each of which changes something -----------------------------------------------------------------------


@pytest.mark.parametrize(("routing", "num_chosen"), [({}, 1), ({"prefix_blocks": 0}, 2)])
async def test_without_prefix_blocks_equal_prompts_spread(routing: dict[str, Any], num_chosen: int) -> None:
    router = make_router(**routing)
    router.update_replicas([FakeReplica("a"), FakeReplica("b")])
    chosen = set()
    for _ in range(20):
        request = pending(engine_call())
        chosen.add(name := await route(router, request))
        end(router, request, name)
    assert len(chosen) == num_chosen


async def test_prefix_blocks_bounds_what_of_a_prompt_is_hashed() -> None:
    router = make_router(prefix_blocks=3)
    router.update_replicas([FakeReplica("a")])
    await route(router, pending(engine_call(tuple(range(10_000)))))
    assert router._fleet._index.num_blocks("a") == 3


async def test_index_blocks_bounds_what_is_remembered_of_a_replica() -> None:
    router = make_router(index_blocks=7)
    router.update_replicas([FakeReplica("a")])
    for i in range(5):
        await route(router, pending(engine_call((i, *PROMPT))))
    assert router._fleet._index.num_blocks("a") == 7


async def holder_is_chosen(report: dict[str, int], **routing: Any) -> bool:
    """Let one of two replicas hold all of PROMPT, which saves it 99 tokens, and have something to do;
    return whether it is chosen."""
    router = make_router(**routing)
    digests: list[bytes] = []
    extend_chain(digests, PROMPT, len(PROMPT) // BLOCK_SIZE, BLOCK_SIZE)
    holder = stats(1.0, *digests, **report)
    router.update_replicas([FakeReplica("holder", holder), FakeReplica("other")])
    return await route(router, pending(engine_call())) == "holder"


async def test_the_slack_lets_a_holder_have_more_to_do_than_the_mean() -> None:
    assert await holder_is_chosen({"queued": 50}, load_factor=1.0, slack_tokens=25)
    assert not await holder_is_chosen({"queued": 50}, load_factor=1.0, slack_tokens=24)


async def test_the_load_factor_lets_a_holder_have_more_to_do_than_the_mean() -> None:
    assert await holder_is_chosen({"queued": 50}, load_factor=2.0, slack_tokens=0)
    assert not await holder_is_chosen({"queued": 50}, load_factor=1.9, slack_tokens=0)


async def test_request_tokens_make_running_requests_a_load() -> None:
    assert await holder_is_chosen({"requests": 8}, request_tokens=10)
    assert not await holder_is_chosen({"requests": 8}, request_tokens=15)


def test_serve_is_told_the_period_of_reports_and_what_the_router_needs() -> None:
    config = router_config(RoutingSettings(stats_period_s=3, index_blocks=5), EngineConfig(block_size=32))
    assert config.request_routing_stats_period_s == 3
    assert config.request_router_kwargs["block_size"] == 32
    assert config.request_router_kwargs["routing"]["index_blocks"] == 5


def test_engines_without_a_prefix_cache_are_not_chosen_for_prefixes() -> None:
    config = router_config(RoutingSettings(), EngineConfig(enable_prefix_caching=False))
    assert config.request_router_kwargs["routing"]["prefix_blocks"] == 0
