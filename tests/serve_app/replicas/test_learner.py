"""Owns the contract of what an ingress replica learns of engines while a changed config is rolled out.
Never starts Ray: handles are scripted, and the test says which engines there are."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from engine.config import ConfigError
from engine.protocol import AdapterRef, EngineError, ErrorCode
from serve_app.adapters.names import AdapterNames
from serve_app.engines import liveness, versions
from serve_app.engines.versions import EngineFacts, EngineVersion
from serve_app.replicas import learner as module
from serve_app.replicas.learner import Learner
from serve_app.replicas.model import learn
from serve_app.replicas.served_model import read_text_side, served_model
from serve_app.settings.application import AppSettings
from tests.support.conditions import until
from tests.support.engines import resolved_config

pytestmark = pytest.mark.anyio

OURS, EARLIER, FOREIGN = EngineVersion("m", "2"), EngineVersion("m", "1"), EngineVersion("other", "0")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_deployments", {})
    monkeypatch.setattr(liveness, "_deployments", {})
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    versions.want(OURS)


class Engine:
    """A handle whose calls are answered in this order; when there is no answer left, they wait."""

    deployment_name = "Engine"

    def __init__(self, *answers: EngineFacts | Exception) -> None:
        self.answers = list(answers)
        self.calls = self.cancelled = 0
        self.facts = SimpleNamespace(remote=self._remote)

    def _remote(self) -> Engine:
        self.calls += 1
        return self

    def __await__(self) -> Generator[Any, None, EngineFacts]:
        while not self.answers:
            yield from asyncio.sleep(0).__await__()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> None:
        self.cancelled += 1


def facts(name: str, version: EngineVersion, **config: Any) -> EngineFacts:
    return EngineFacts(name, version, resolved_config(**config))


class Rig:
    def __init__(self, *answers: EngineFacts | Exception) -> None:
        self.engine = Engine(*answers)
        self.taken: list[EngineFacts] = []
        self.error: Exception | None = None
        self.learner = Learner(self.engine, self._take)  # type: ignore[arg-type]

    async def _take(self, told: EngineFacts) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.taken.append(told)

    def joins(self, name: str, version: EngineVersion) -> None:
        """Let the router know of an engine."""
        versions.tell(name, version)
        liveness.set_engines(liveness.engines() | {name})
        self.learner.look()

    @property
    def is_asking(self) -> bool:
        return self.learner._again is not None and not self.learner._again.done()


# --- whom to ask ----------------------------------------------------------------------------------------------------


async def test_an_engine_of_the_own_settings_is_asked_once() -> None:
    rig = Rig(told := facts("a", OURS))
    await rig.learner.meet()
    rig.joins("a", OURS)
    rig.joins("b", OURS)
    assert not rig.is_asking
    assert (rig.taken, rig.engine.calls, rig.learner.is_known) == ([told], 1, True)


async def test_what_an_engine_of_earlier_settings_said_holds_only_until_there_is_one_of_the_own() -> None:
    """Regression: a new ingress replica kept the old engines' limits for good."""
    rig = Rig(old := facts("a", EARLIER))
    await rig.learner.meet()
    assert rig.taken == [old]
    rig.joins("b", EARLIER)
    assert not rig.is_asking
    assert rig.engine.calls == 1, "there is nobody to ask yet"
    rig.engine.answers = [facts("a", EARLIER), new := facts("c", OURS)]  # the router has not heard of it at the first
    rig.joins("c", OURS)
    await until(lambda: rig.taken == [old, new])
    await until(lambda: not rig.is_asking)
    rig.joins("d", OURS)
    assert not rig.is_asking
    assert rig.engine.calls == 3


@pytest.mark.parametrize("error", [ActorDiedError(), EngineError(ErrorCode.ENGINE_DEAD, "gone")], ids=["call", "take"])
async def test_a_new_engine_that_does_not_answer_is_asked_again(error: Exception) -> None:
    rig = Rig(facts("a", EARLIER))
    await rig.learner.meet()
    new = facts("b", OURS)
    rig.engine.answers = [error, new] if isinstance(error, ActorDiedError) else [new, new]
    rig.error = None if isinstance(error, ActorDiedError) else error
    rig.joins("b", OURS)
    await until(lambda: rig.taken[-1] is new)


async def test_an_engine_of_another_model_is_none_of_the_own_and_the_next_is_asked() -> None:
    rig = Rig(facts("a", FOREIGN))
    meeting = asyncio.ensure_future(rig.learner.meet())
    await until(lambda: rig.engine.calls == 2)
    assert (rig.taken, meeting.done(), versions.is_foreign("a")) == ([], False, True)
    rig.engine.answers = [told := facts("b", OURS)]
    await meeting
    assert rig.taken == [told]


async def test_a_call_is_cancelled_with_the_wait_for_it() -> None:
    rig = Rig()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await rig.learner.meet()
    assert rig.engine.cancelled == 1


def test_what_an_engine_is_stays_known_after_its_end_until_there_were_very_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its streams look for an engine with the same files."""
    monkeypatch.setattr(versions, "_MOST", 3)
    for name in "abcd":
        versions.tell(name, OURS)
    assert [name for name in "abcd" if versions.version_of(name)] == ["b", "c", "d"]


# --- what is taken --------------------------------------------------------------------------------------------------


class Client:
    """Has what engines of the own settings say of their adapters."""

    def __init__(self, *adapters: AdapterRef) -> None:
        self.known = list(adapters)
        self.longest = 0

    def serves(self, max_model_len: int) -> None:
        self.longest = max_model_len

    async def adapters(self) -> list[AdapterRef]:
        return self.known


async def test_adapters_of_earlier_settings_are_taken_only_where_these_name_the_same() -> None:
    settings = AppSettings.model_validate(
        {"engine": {"executor": "fake", "max_loras": 2}, "lora_adapters": {"same": "/same", "new": "/new"}}
    )
    text = read_text_side(settings)
    placeholders = [AdapterRef(name, path, "") for name, path in settings.lora_adapters.items()]
    names, client = AdapterNames(served_model(settings, text, None), placeholders), Client()
    same, new = AdapterRef("same", "/same", "0a"), AdapterRef("new", "/new", "0b")
    config = resolved_config(max_loras=2, max_model_len=40)
    old = EngineFacts("a", EARLIER, config, (same, AdapterRef("gone", "/gone", "0c"), AdapterRef("new", "/old", "0d")))
    await learn(old, settings, text, client, names)  # type: ignore[arg-type]
    assert [names.get(name) for name in ("same", "gone", "new")] == [same, None, placeholders[1]]
    assert (client.longest, names.base.max_model_len) == (config.max_request_tokens, config.max_request_tokens)
    client.known = [same, new]
    await learn(EngineFacts("b", OURS, config), settings, text, client, names)  # type: ignore[arg-type]
    assert names.get("new") == new


async def test_settings_that_do_not_fit_a_new_engine_are_an_error_in_the_log_and_not_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(facts("a", EARLIER))
    await rig.learner.meet()
    rig.engine.answers, rig.error = [facts("b", OURS)], ConfigError("images are limited, and it takes none")
    rig.joins("b", OURS)
    await until(lambda: "images are limited" in caplog.text)
    assert rig.engine.calls == 2
