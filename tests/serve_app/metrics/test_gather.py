"""Contracts of asking all replicas: one that hangs,
dies or answers nonsense costs a scrape its own series and no other.
Never starts Ray: the handle's broadcast is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from serve_app.channel.handle_client import HandleClient
from serve_app.engines import engine_count
from serve_app.metrics import gather as module
from serve_app.metrics.activity import EngineActivity, IngressActivity, StepActivity
from serve_app.metrics.gather import gather
from serve_app.metrics.values import ReplicaSamples, Sample, encode

pytestmark = pytest.mark.anyio

NUMBERS = [field.name for field in fields(EngineActivity) if field.name not in ("engine", "steps", "tiers")]
Replica = Callable[[], Awaitable[bytes]]


def answers(name: str) -> Replica:
    async def answer() -> bytes:
        return encode(ReplicaSamples(name, (Sample("vllm:num_preemptions", (), 1),)))

    return answer


def raises(error: Exception) -> Replica:
    async def fail() -> bytes:
        raise error

    return fail


async def hangs() -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def babbles() -> bytes:
    return b"babble"


class Call:
    def __init__(self, replica: Replica) -> None:
        self.get_async = replica


class Handle:
    """A deployment's handle with these replicas; or nobody can be asked, for this reason."""

    def __init__(self, *replicas: Replica, error: Exception | None = None) -> None:
        self._replicas = replicas
        self._error = error
        self.asked: list[tuple[object, ...]] = []

    def broadcast(self, method: str, *arguments: object) -> Handle:
        self.asked.append((method, *arguments))
        return self

    async def _fetch_replica_results_async(self) -> list[Call]:
        if self._error is not None:
            raise self._error
        return [Call(replica) for replica in self._replicas]


async def names(handle: Any) -> tuple[list[str], int]:
    samples, missing = await gather(handle, "metrics", ReplicaSamples)
    return [replica.replica_id for replica in samples], missing


async def test_all_replicas_are_asked_for_what_they_have_measured() -> None:
    handle = Handle(answers("a"), answers("b"))
    assert await names(handle) == (["a", "b"], 0)
    assert handle.asked == [("metrics",)]


@pytest.mark.parametrize(
    "broken",
    [hangs, babbles, raises(ActorDiedError()), raises(RequestCancelledError("id"))],
    ids=["hangs", "babbles", "died", "cancelled"],
)
async def test_a_replica_that_does_not_answer_is_counted_and_the_others_are_there(
    broken: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    assert await names(Handle(answers("a"), broken, answers("b"))) == (["a", "b"], 1)


@pytest.mark.parametrize("error", [DeploymentUnavailableError(DeploymentID("Engine", "app")), ActorDiedError()])
async def test_a_deployment_in_which_no_replica_can_be_asked_counts_as_one_missing_replica(error: Exception) -> None:
    assert await names(Handle(error=error)) == ([], 1)


async def test_a_bug_is_not_taken_for_a_missing_replica() -> None:
    with pytest.raises(ZeroDivisionError):
        await names(Handle(raises(ZeroDivisionError())))


def client_of(engine: Handle, ingress: Handle) -> HandleClient:
    unused: Any = None
    handles: Any = {"engine": engine, "ingress": ingress}
    return HandleClient(**handles, receiver=unused, migration=unused)


async def test_a_scrape_has_what_both_deployments_answer_and_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_count, "_known", {"Engine": 2})
    scrape = await client_of(Handle(answers("e1"), babbles), Handle(answers("i1"), answers("i2"))).metrics()
    assert [replica.replica_id for replica in scrape.engines] == ["e1"]
    assert [replica.replica_id for replica in scrape.ingresses] == ["i1", "i2"]
    assert scrape.missing == {"engine": 1, "ingress": 0}


def activity(name: str) -> Replica:
    async def answer() -> bytes:
        steps = (StepActivity(5, 1, (30, 2), 0, 1.5, 20),)
        return encode(EngineActivity(engine=name, **dict.fromkeys(NUMBERS, 1), steps=steps))

    return answer


def waiting(name: str) -> Replica:
    async def answer() -> bytes:
        return encode(IngressActivity(name, 3, 2))

    return answer


async def test_what_replicas_do_is_asked_of_both_deployments_with_what_is_known_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_count, "_known", {"Engine": 2})
    engine, ingress = Handle(activity("e1"), babbles, activity("e2")), Handle(waiting("i1"), answers("i2"))
    told = await client_of(engine, ingress).activity({"e1": 4})
    assert engine.asked == [("activity", {"e1": 4})]
    assert ingress.asked == [("activity",)]
    assert [one.engine for one in told.engines] == ["e1", "e2"]
    assert told.engines[0].steps == (StepActivity(5, 1, (30, 2), 0, 1.5, 20),)
    assert told.ingresses == [IngressActivity("i1", 3, 2)]
    assert told.num_missing == 2, "one answers nonsense, and one something else"


async def test_looking_on_does_not_wake_a_deployment_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_count, "_known", {"Engine": 0})
    asleep = Handle(hangs)
    told = await client_of(asleep, Handle(waiting("i1"))).activity({})
    assert asleep.asked == []
    assert (told.engines, told.num_missing) == ([], 0)


async def test_a_scrape_does_not_wake_a_deployment_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_count, "_known", {"Engine": 0})
    asleep = Handle(hangs)
    scrape = await client_of(asleep, Handle(answers("i1"))).metrics()
    assert asleep.asked == []
    assert (scrape.engines, scrape.missing) == ([], {"engine": 0, "ingress": 0})


async def test_a_client_of_one_of_several_models_asks_its_own_engines_and_for_that_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a model that may sleep is not woken by a look, also while nothing is known of its engines."""
    known: dict[str, int] = {"Engine": 0, "Engine-a": 1}
    monkeypatch.setattr(engine_count, "_known", known)
    engine, ingress = Handle(answers("e1")), Handle(answers("i1"))
    unused: Any = None
    handles: tuple[Any, Any] = (engine, ingress)
    client = HandleClient(*handles, unused, unused, may_sleep=True, deployment="Engine-a", model_id="a")
    await client.metrics()
    assert (engine.asked, ingress.asked) == ([("metrics",)], [("metrics", "a")])
    known.clear()
    scrape = await client.metrics()
    assert len(engine.asked) == 1
    assert scrape.missing == {"engine": 0, "ingress": 0}
