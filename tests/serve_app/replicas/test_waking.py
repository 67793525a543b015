"""Owns the contract of waking a model: one wait for all requests, a bound on it, and room made by the model that was
not used for longest, which is never one with requests.
Never starts Ray: handles and the cluster are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from engine.protocol import ErrorCode, RequestRejected
from serve_app.admission.gate import Gate
from serve_app.engines import engine_count, versions
from serve_app.engines.versions import EngineFacts, EngineVersion
from serve_app.errors.api_error import ApiError
from serve_app.replicas import room_maker
from serve_app.replicas.cluster import is_without_place, lacking
from serve_app.replicas.learner import Learner
from serve_app.replicas.room_maker import RoomMaker, Sleepy, longest_idle
from serve_app.replicas.sleeper import EngineSleeper
from tests.support.conditions import until
from tests.support.engines import resolved_config

pytestmark = pytest.mark.anyio

FACTS = EngineFacts("e", EngineVersion("model", "settings"), resolved_config())
asleep: list[str] = []
"""The deployments that were asked to sleep, in that order."""


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Each deployment's number of engines."""
    known: dict[str, int] = {}
    asleep.clear()
    monkeypatch.setattr(engine_count, "_known", known)
    monkeypatch.setattr(versions, "_deployments", {})
    monkeypatch.setattr(room_maker, "LOOK_S", 0.01)
    return known


class Call:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.answer).__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Engine:
    """The handle of a model's engines. `idle`: what they say of their last requests; an error is raised."""

    def __init__(self, name: str, idle: list[float | None] | Exception | None = None) -> None:
        self.deployment_name = name
        self.calls: list[Call] = []
        self.idle = idle
        self.asked_to_sleep = 0
        self.facts = SimpleNamespace(remote=self._remote)

    def _remote(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]

    def broadcast(self, method: str) -> Any:
        async def results_async() -> list[Any]:
            if isinstance(self.idle, Exception):
                raise self.idle
            assert self.idle is not None
            if method == "idle_s":
                return list(self.idle)
            assert method == "sleep_if_idle"
            self.asked_to_sleep += 1
            asleep.append(self.deployment_name)
            engine_count.set_num_engines(0, self.deployment_name)
            return [True] * len(self.idle)

        return SimpleNamespace(results_async=results_async)


class Rig:
    def __init__(self, timeout_s: float = 10) -> None:
        self.engine = Engine("Engine-a")
        self.learnt: list[Any] = []
        self.making_room = asyncio.Event()
        self.stopped = asyncio.Event()
        self.learner = Learner(self.engine, self._learn)  # type: ignore[arg-type]
        self.sleeper = EngineSleeper(self.learner, "Engine-a", "a", timeout_s, self._make_room)

    async def _learn(self, facts: EngineFacts) -> None:
        self.learnt.append(facts)

    async def _make_room(self) -> None:
        self.making_room.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()


# --- the wait -------------------------------------------------------------------------------------------------------


async def test_all_requests_wait_for_one_call_and_what_it_says_is_learnt_once() -> None:
    rig = Rig()
    waits = [asyncio.ensure_future(rig.sleeper.wake()) for _ in range(3)]
    await rig.making_room.wait()
    assert len(rig.engine.calls) == 1
    rig.engine.calls[0].answer.set_result(FACTS)
    await asyncio.gather(*waits)
    assert (rig.learnt, rig.sleeper.is_known) == ([FACTS], True)
    await rig.stopped.wait()


async def test_a_model_that_is_awake_is_not_asked() -> None:
    rig = Rig()
    rig.learner.is_known = True
    engine_count.set_num_engines(1, "Engine-a")
    await rig.sleeper.wake()
    assert not rig.engine.calls
    engine_count.set_num_engines(0, "Engine-a")
    wait = asyncio.ensure_future(rig.sleeper.wake())
    await rig.making_room.wait()
    rig.engine.calls[0].answer.set_result(FACTS)
    await wait
    assert rig.learnt == [], "it is known already"
    assert versions.version_of("e", "Engine-a") == FACTS.version, "what it is counts for routing at once"


async def test_a_stop_ends_the_wait_and_each_later_one() -> None:
    """Serve kills the replica long before `wake_timeout_s` is over: the connection was cut."""
    rig = Rig()
    wait = asyncio.ensure_future(rig.sleeper.wake())
    await rig.making_room.wait()
    rig.sleeper.end()
    for one in (wait, rig.sleeper.wake()):
        with pytest.raises(RequestRejected, match="is draining") as caught:
            await one
        assert caught.value.code is ErrorCode.DRAINING
    rig.engine.calls[0].answer.set_result(FACTS)
    await rig.stopped.wait()


async def test_a_client_that_leaves_does_not_end_the_wait_of_the_others() -> None:
    rig = Rig()
    first, second = (asyncio.ensure_future(rig.sleeper.wake()) for _ in range(2))
    await rig.making_room.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not rig.stopped.is_set()
    rig.engine.calls[0].answer.set_result(FACTS)
    await second


async def test_the_wait_is_bounded_and_the_next_request_begins_another() -> None:
    rig = Rig(timeout_s=0.01)
    with pytest.raises(
        ApiError, match=r"`a` has no engine and could not be woken: no engine of it was ready within 0.01 s"
    ):
        await rig.sleeper.wake()
    assert rig.engine.calls[0].cancelled
    await rig.stopped.wait()
    with pytest.raises(ApiError) as refused:
        await rig.sleeper.wake()
    assert (refused.value.status, refused.value.code, refused.value.headers["Retry-After"]) == (
        503,
        "model_asleep",
        "10",
    )
    assert len(rig.engine.calls) == 2


async def test_an_engine_that_dies_on_the_way_is_a_503_that_points_to_the_log() -> None:
    rig = Rig()
    wait = asyncio.ensure_future(rig.sleeper.wake())
    await rig.making_room.wait()
    rig.engine.calls[0].answer.set_exception(ActorDiedError())
    with pytest.raises(ApiError, match="could not be woken: its engine could not be started"):
        await wait
    assert not rig.sleeper.is_known


# --- room -----------------------------------------------------------------------------------------------------------


class Cluster:
    """Has no room for a deployment until another has gone to sleep."""

    def __init__(self, short: frozenset[str] = frozenset({"CPU"})) -> None:
        self.short = short
        self.looks = 0

    async def shortage(self, deployment: str, needs: Mapping[str, float]) -> frozenset[str]:
        self.looks += 1
        return self.short


def sleepy(name: str, idle: list[float | None] | Exception | None, **needs: float) -> Any:
    engine_count.set_num_engines(0 if idle is None else 1, name)
    return Sleepy(Engine(name, idle), needs or {"CPU": 1.0}, Gate())  # type: ignore[arg-type]


async def make_room(cluster: Cluster, *models: Any, looks: int = 12) -> list[str]:
    """Let the first model be woken, and return which others were asked to sleep, in that order."""
    task = asyncio.ensure_future(RoomMaker(models, cluster).make_room(models[0].deployment))
    await until(lambda: cluster.looks >= looks or any(model.engine.asked_to_sleep for model in models))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return list(asleep)


async def test_the_model_that_was_not_used_for_longest_goes_to_sleep() -> None:
    models = (sleepy("a", None), sleepy("b", [5.0]), sleepy("c", [50.0, 20.0]), sleepy("d", [15.0]))
    cluster = Cluster()
    assert (await make_room(cluster, *models))[0] == "c"


async def test_a_model_is_as_recently_used_as_its_last_engine() -> None:
    one, other = sleepy("one", [5.0]), sleepy("other", [4.0])
    assert longest_idle([(one, 5.0), (other, 4.0)]) is one
    assert longest_idle([(one, None), (other, 4.0)]) is other
    assert longest_idle([(one, None)]) is None


@pytest.mark.parametrize(
    "idle", [[None], [70.0, None], [], ActorDiedError(), TimeoutError()], ids=["busy", "one", "none", "died", "silent"]
)
async def test_a_model_with_requests_or_that_does_not_say_is_not_touched(idle: Any) -> None:
    busy = sleepy("b", idle)
    assert await make_room(Cluster(), sleepy("a", None), busy) == []


async def test_a_model_whose_requests_are_still_in_this_ingress_is_not_touched() -> None:
    waiting = sleepy("b", [50.0])
    with waiting.gate.enter():
        assert await make_room(Cluster(), sleepy("a", None), waiting) == []


async def test_only_a_model_that_holds_what_is_short_goes_to_sleep() -> None:
    models = (sleepy("a", None, CPU=1, GPU=1), sleepy("b", [90.0], CPU=1, GPU=0), sleepy("c", [9.0], CPU=1, GPU=1))
    assert await make_room(Cluster(frozenset({"GPU"})), *models) == ["c"]


async def test_nobody_goes_to_sleep_while_there_is_room() -> None:
    assert await make_room(Cluster(frozenset()), sleepy("a", None), sleepy("b", [50.0])) == []


async def test_the_next_goes_to_sleep_if_one_was_not_enough_and_one_that_sleeps_already_is_not_asked() -> None:
    models = (sleepy("a", None), sleepy("b", [50.0]), sleepy("c", [40.0]))
    task = asyncio.ensure_future(RoomMaker(models, Cluster()).make_room("a"))
    await until(lambda: models[2].engine.asked_to_sleep == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert models[1].engine.asked_to_sleep == 1


# --- the cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "nodes", "short"),
    [
        ({"CPU": 1.0, "GPU": 1.0}, [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}], set()),
        ({"CPU": 1.0, "GPU": 1.0}, [{"CPU": 4.0}], {"GPU"}),
        ({"CPU": 1.0, "GPU": 1.0}, [{"CPU": 4.0}, {"GPU": 1.0}], {"CPU", "GPU"}),
        ({"CPU": 0.5, "GPU": 0.0}, [{"CPU": 0.25}], {"CPU"}),
        ({"CPU": 0.5, "GPU": 0.0}, [], {"CPU"}),
        ({"CPU": 0.0, "GPU": 0.0}, [{}], set()),
    ],
)
def test_what_is_short_is_what_no_node_has_or_has_together(
    needs: dict[str, float], nodes: list[dict[str, float]], short: set[str]
) -> None:
    assert lacking(needs, nodes) == short


@pytest.mark.parametrize(("process", "without"), [(0, True), (4711, False)])
def test_an_actor_that_has_a_process_has_a_place(process: int, without: bool) -> None:
    assert is_without_place({"Pid": process}) is without


async def test_a_replica_that_has_just_got_its_place_sends_nobody_to_sleep() -> None:
    """Its resources are taken, and its process is only about to start, which looks like a shortage for a moment."""
    models, cluster = (sleepy("a", None), sleepy("b", [50.0])), Cluster()
    task = asyncio.ensure_future(RoomMaker(models, cluster).make_room("a"))
    for _ in range(3):
        cluster.looks, cluster.short = 0, frozenset({"CPU"})
        await until(lambda: cluster.looks >= room_maker.PATIENCE // 2)
        cluster.looks, cluster.short = 0, frozenset()
        await until(lambda: cluster.looks >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asleep == []
