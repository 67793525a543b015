"""Contracts of a request's wall time by cause: it adds up, and what was slow is named first. Long: each cause has one.
The clock leaps where a test says that something took long, so that nothing else counts beside it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.types import ASGIApp

from engine.protocol import EngineError, EngineTimes, ErrorCode, Event, SamplingParams, Submission, TimeCause
from serve_app.admission.gate import Gate
from serve_app.api import ingress
from serve_app.api.generation.submission import prepare_chat
from serve_app.api.openai.answer_schema import RequestTiming
from serve_app.api.timing.recent import RecentTimes
from serve_app.api.timing.split import ABOUT, CLIENT, MIGRATION, NETWORK, OWN, UNRECORDED, EndedTimes, wall_seconds
from serve_app.auth.keys import Keys, digest
from serve_app.channel.migration import Migration
from serve_app.engines.engine_client import Move, StreamRecord
from serve_app.metrics.request_times import RequestTimes
from serve_app.settings.auth import ApiKey
from serve_app.settings.limits import GatePolicy
from tests.serve_app.harness import (
    CHAT,
    Answer,
    Exchange,
    ScriptedClient,
    Step,
    app_for,
    finished,
    make_time_pass,
    scheduled,
    tokens,
)
from tests.support.conditions import until
from tests.support.seeds import seeded_random

pytestmark = pytest.mark.anyio

LONG_S = 5.0
"""Much more than what really passes, and less than any limit of a test."""
TOLD = EngineTimes({TimeCause.QUEUE: 0.001, TimeCause.PREFILL: 0.002, TimeCause.DECODE: 0.004}, 3, 900)
END = [replace(finished(), times=TOLD)]
STREAM = CHAT | {"stream": True}
Leap = Callable[[], None]


@pytest.fixture
async def leap(monkeypatch: pytest.MonkeyPatch) -> Leap:
    """Moves the event loop's clock by LONG_S, once."""
    return make_time_pass(LONG_S, monkeypatch)


def post(app: ASGIApp, body: Any = CHAT, *headers: tuple[str, str]) -> Exchange:
    told = (("content-type", "application/json"), *headers)
    return Exchange(app, "POST", "/v1/chat/completions", json.dumps(body).encode(), told)


async def ask(app: ASGIApp, name: str, *headers: tuple[str, str]) -> Answer:
    return await Exchange(app, "GET", f"/v1/requests/{name}/timing", headers=headers).finish()


async def slowest(app: ASGIApp, name: str) -> str:
    """Return the first cause of a request that had a leap. Its parts must add up."""
    timing = (await ask(app, name)).json
    parts = [*timing["own"], *timing["slowed_by"]]
    assert sum(part["ms"] for part in parts) == pytest.approx(timing["wall_ms"], abs=0.02)
    for part in parts:
        assert part["without_ms"] == pytest.approx(timing["wall_ms"] - part["ms"], abs=0.01)
    assert timing["wall_ms"] > LONG_S * 1000
    return str(timing["slowed_by"][0]["cause"])


# --- what was slow outside an engine's own account -------------------------------------------------------------------


async def test_a_body_that_comes_slowly_is_named(leap: Leap) -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("Bon"), END))
    exchange, body = post(app), json.dumps(CHAT).encode()
    exchange._inbox.get_nowait()
    exchange._inbox.put_nowait({"type": "http.request", "body": body[:10], "more_body": True})
    await until(exchange._inbox.empty)
    leap()
    exchange._inbox.put_nowait({"type": "http.request", "body": body[10:], "more_body": False})
    assert await slowest(app, (await exchange.finish()).json["id"]) == "upload"


async def test_work_in_the_ingress_replica_is_named(leap: Leap, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(*args: Any) -> Any:
        leap()
        return await prepare_chat(*args)

    monkeypatch.setattr(ingress, "prepare_chat", slowly)
    app = app_for(ScriptedClient([scheduled()], tokens("Bon"), END))
    assert await slowest(app, (await post(app).finish()).json["id"]) == "server"


async def test_a_wait_at_the_gate_is_named(leap: Leap) -> None:
    gate = Gate(GatePolicy(dispatch_per_engine=1), lambda: 1)
    app = app_for(ScriptedClient([scheduled()], tokens("Bon"), END), gate=gate)
    with gate.enter() as before:
        await before.dispatched(1)
        exchange = post(app)
        await until(lambda: gate.num_waiting)
        leap()
    assert await slowest(app, (await exchange.finish()).json["id"]) == "gate"


async def test_a_call_that_waits_for_a_replica_is_named(leap: Leap) -> None:
    app = app_for(ScriptedClient(leap, [scheduled()], tokens("Bon"), END))
    assert await slowest(app, (await post(app).finish()).json["id"]) == "network"


async def test_a_client_that_takes_a_stream_slowly_is_named_even_where_its_engine_ended_long_ago(leap: Leap) -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("Bon"), tokens("jour"), END))
    exchange = post(app, STREAM, ("x-request-id", "slow-reader"))
    exchange.may_send.clear()
    await until(lambda: exchange.has_sent)
    leap()
    exchange.may_send.set()
    await exchange.finish()
    assert await slowest(app, "slow-reader") == "client"


async def test_a_client_that_takes_a_whole_answer_slowly_is_named(leap: Leap) -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("Bon"), END))
    exchange = post(app)
    exchange.may_send.clear()
    await until(lambda: exchange.has_sent)
    leap()
    exchange.may_send.set()
    assert await slowest(app, (await exchange.finish()).json["id"]) == "client"


class Moving(ScriptedClient):
    """Reaches an engine that is lost after some tokens, and then another one."""

    def __init__(self, leap: Leap) -> None:
        super().__init__()
        self._leap = leap

    def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        lost = EngineError(ErrorCode.ENGINE_DEAD, "")
        scripts: list[list[Step]] = [[[scheduled()], tokens("Bon"), self._leap, lost], [tokens("jour"), END]]
        return Migration(3, 60.0, 4096).stream(submission, lambda *_: _Call(scripts.pop(0)), record)


class _Call:
    replica_id = "replica"

    def __init__(self, script: list[Step]) -> None:
        self._script = script

    async def take(self) -> list[Event]:
        step = self._script.pop(0)
        if callable(step):
            step()
            step = self._script.pop(0)
        if isinstance(step, Exception):
            raise step
        assert isinstance(step, list)
        return step

    def close(self, *, complete: bool = False) -> None:
        return


async def test_an_engine_that_falls_silent_and_is_lost_is_named(leap: Leap) -> None:
    app = app_for(Moving(leap))
    answer = (await post(app).finish()).json
    assert answer["choices"][0]["message"]["content"] == "Bonjour"
    assert await slowest(app, answer["id"]) == "migration"
    assert (await ask(app, answer["id"])).json["migrations"] == 1


# --- the account, with an engine's own in it -------------------------------------------------------------------------


def engines_account(window_s: float, record: StreamRecord, *, unread_s: float = 0.0) -> dict[str, float]:
    """Return the seconds of a request that spent all but nothing outside the engines, without causes of none."""
    times = RequestTimes.__new__(RequestTimes)
    times.arrived, times.read_at, times.given, times.gate_s, times.unread_s = 1.0, 1.0, 1.0, 0.0, unread_s
    record.given, record.returned, record.unread_s = 1.0, 1.0 + window_s, unread_s
    return {cause: value for cause, value in wall_seconds(times, 1.0 + window_s, record).items() if value > 1e-9}


@pytest.mark.parametrize("cause", sorted(set(TimeCause) - OWN))
def test_what_an_engine_names_is_named(cause: TimeCause) -> None:
    record = StreamRecord(times=EngineTimes({TimeCause.DECODE: 1.0, cause: 2.0}))
    found = engines_account(3.5, record)
    assert found == pytest.approx({TimeCause.DECODE: 1.0, cause: 2.0, NETWORK: 0.5})


def test_what_the_client_did_not_take_while_its_engine_worked_slowed_nothing_down() -> None:
    told = EngineTimes({TimeCause.DECODE: 3.0})
    assert engines_account(3.0, StreamRecord(times=told), unread_s=2.5) == pytest.approx({TimeCause.DECODE: 3.0})
    found = engines_account(5.0, StreamRecord(times=told), unread_s=4.0)
    assert found == pytest.approx({TimeCause.DECODE: 3.0, CLIENT: 2.0})


def test_all_that_comes_before_the_next_token_of_another_engine_is_the_migrations() -> None:
    told = EngineTimes({TimeCause.QUEUE: 1.0, TimeCause.PREFILL: 2.0, TimeCause.DECODE: 4.0})
    record = StreamRecord(times=told, lost_s=0.5, before_loss_s=2.0)
    record.moves.append(Move(2.0, ErrorCode.ENGINE_DEAD, "a"))
    found = engines_account(10.0, record)
    assert found == pytest.approx({MIGRATION: 3.5, UNRECORDED: 2.0, TimeCause.DECODE: 4.0, NETWORK: 0.5})


@pytest.mark.parametrize("told", [None, EngineTimes({TimeCause.PREFILL: 2.0})])
def test_an_input_that_waited_for_earlier_ones_of_its_request_was_in_the_queue(told: EngineTimes | None) -> None:
    """Regression: of a thousand inputs, whose engine has 128 at a time, nearly all the time was called own prefill."""
    times = RequestTimes.__new__(RequestTimes)
    times.arrived, times.read_at, times.given, times.gate_s, times.unread_s = 1.0, 1.0, 1.0, 0.0, 0.0
    record = StreamRecord(given=8.0, returned=10.0, times=told)
    found = {cause: value for cause, value in wall_seconds(times, 10.0, record).items() if value}
    assert found == {TimeCause.QUEUE: 7.0, (TimeCause.PREFILL if told else UNRECORDED): 2.0}


def test_an_engine_that_worked_on_after_a_stop_string_has_no_more_time_than_there_was() -> None:
    record = StreamRecord(times=EngineTimes({TimeCause.QUEUE: 1.0, TimeCause.DECODE: 3.0}))
    assert engines_account(2.0, record) == pytest.approx({TimeCause.QUEUE: 0.5, TimeCause.DECODE: 1.5})


def test_whatever_was_noted_the_causes_add_up_and_none_is_negative() -> None:
    random = seeded_random()
    for _ in range(500):
        seconds = {cause: random.random() for cause in random.sample(list(TimeCause), random.randrange(5))}
        record = StreamRecord(times=random.choice((None, EngineTimes(seconds))), lost_s=random.random())
        record.before_loss_s = random.choice((0.0, random.random()))
        window_s = 3 * random.random()
        found = engines_account(window_s, record, unread_s=window_s * random.random())
        assert sum(found.values()) == pytest.approx(window_s)
        assert min(found.values(), default=0.0) >= 0


def test_every_cause_has_words_and_a_line_in_the_documentation() -> None:
    assert ABOUT.keys() >= {*TimeCause, MIGRATION, NETWORK, CLIENT, UNRECORDED}
    page = (Path(__file__).parents[4] / "docs/how-to/why-slow.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {str(cause) for cause in ABOUT}
    shown = "".join(line + "\n" for line in page.splitlines() if line.startswith("    "))
    told = RequestTiming.model_validate(yaml.safe_load(shown))
    assert sum(part.ms for part in (*told.own, *told.slowed_by)) == pytest.approx(told.wall_ms)
    assert all(part.about == ABOUT[part.cause] for part in (*told.own, *told.slowed_by))


# --- who may know ----------------------------------------------------------------------------------------------------


async def test_a_request_is_found_by_its_answers_id_and_by_its_request_id() -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("Bonjour"), END))
    answer = await post(app, CHAT, ("x-request-id", "mine")).finish()
    by_id, by_name = (await ask(app, answer.json["id"])).json, (await ask(app, "mine")).json
    assert by_id == by_name
    assert (by_id["id"], by_id["request_id"], by_id["status"]) == (answer.json["id"], "mine", "complete")
    assert by_id["ahead"] == {"requests": 3, "prompt_tokens": 900}
    assert {part["cause"] for part in by_id["own"]} == {"prefill", "decode"}
    assert (await Exchange(app, "GET", "/requests/mine/timing").finish()).status == 200


async def test_kv_that_was_loaded_is_the_requests_own_work_like_the_prefill_that_it_saves() -> None:
    told = EngineTimes({TimeCause.KV_LOAD: 0.003, TimeCause.QUEUE: 0.001, TimeCause.DECODE: 0.004})
    app = app_for(ScriptedClient([scheduled()], tokens("Bonjour"), [replace(finished(), times=told)]))
    found = (await ask(app, (await post(app, CHAT).finish()).json["id"])).json
    assert {part["cause"] for part in found["own"]} >= {"kv_load", "decode"}
    assert "queue" in {part["cause"] for part in found["slowed_by"]}


async def test_another_tenants_request_is_as_unknown_as_one_that_never_was() -> None:
    keys = Keys(tuple(ApiKey(tenant=name, sha256=digest(name.encode())) for name in ("ann", "bob")))
    app = app_for(ScriptedClient([scheduled()], tokens("Bonjour"), END), keys=keys)
    answer = await post(app, CHAT, ("authorization", "Bearer ann"), ("x-request-id", "hers")).finish()
    ann, bob = ("authorization", "Bearer ann"), ("authorization", "Bearer bob")
    for name in (answer.json["id"], "hers"):
        assert (await ask(app, name, ann)).status == 200
        stranger, nobody = await ask(app, name, bob), await ask(app, "never", ann)
        assert (stranger.status, stranger.error) == (nobody.status, nobody.error)
        assert stranger.error["code"] == "request_not_found"
        assert (await ask(app, name)).status == 401


def ended(answer_id: str | None, request_id: str) -> EndedTimes:
    times = RequestTimes()
    times.has_body()
    return EndedTimes(answer_id, request_id, "complete", times, times.now(), None)


async def test_requests_of_other_ingress_replicas_are_found_through_the_client() -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("Bonjour"), END))
    await post(app, CHAT, ("x-request-id", "mine")).finish()
    elsewhere = app_for(other := ScriptedClient())
    assert (await ask(elsewhere, "mine")).status == 404
    other.timings_elsewhere["theirs", ""] = ended("chatcmpl-1", "theirs").timing()
    assert (await ask(elsewhere, "theirs")).json["id"] == "chatcmpl-1"


async def test_requests_that_fail_or_lose_their_client_are_kept_too() -> None:
    app = app_for(ScriptedClient(EngineError(ErrorCode.STEP_FAILED, "no")))
    await post(app, CHAT, ("x-request-id", "failed")).finish()
    assert (await ask(app, "failed")).json["status"] == "error"
    app = app_for(client := ScriptedClient([scheduled()], tokens("Bon"), asyncio.Event()))
    exchange = post(app, STREAM, ("x-request-id", "left"))
    await client.started.wait()
    exchange.disconnect()
    await asyncio.wait([exchange.task])
    assert (await ask(app, "left")).json["status"] == "client_gone"


async def test_the_oldest_requests_are_forgotten_and_the_last_of_a_name_counts() -> None:
    recent = RecentTimes(most=2)
    for number, name in enumerate(("a", "b", "b", "c")):
        recent.add(ended(f"id-{number}", name), "")
    assert [await recent.find(name, "") is not None for name in ("a", "b", "c")] == [False, True, True]
    found = await recent.find("b", "")
    assert found is not None
    assert found.id == "id-2"
    assert await recent.find("id-1", "") is None


async def test_one_tenants_requests_push_none_of_anothers_out() -> None:
    """Regression: who saw its own requests forgotten could count those of others."""
    recent = RecentTimes(most=2)
    recent.add(ended("hers", "a"), "ann")
    for number in range(9):
        recent.add(ended(f"his-{number}", "b"), "bob")
    assert await recent.find("hers", "ann") is not None
    assert await recent.find("hers", "bob") is None


async def test_an_answers_id_cannot_be_taken_by_another_requests_name() -> None:
    recent = RecentTimes()
    recent.add(ended("chatcmpl-1", "a"), "")
    recent.add(ended(None, "chatcmpl-1"), "")
    found = await recent.find("chatcmpl-1", "")
    assert found is not None
    assert found.request_id == "a"


# --- regressions: who was blamed -------------------------------------------------------------------------------------


async def first_cause(app: ASGIApp, name: str) -> str:
    timing = (await ask(app, name)).json
    return str(timing["slowed_by"][0]["cause"])


def test_what_a_prompts_first_answer_waited_for_is_no_prefill_of_the_others() -> None:
    told = EngineTimes({TimeCause.QUEUE: 6.0, TimeCause.PREFILL: 2.0, TimeCause.DECODE: 9.0}, 9, 100)
    times = RequestTimes.__new__(RequestTimes)
    times.arrived = times.read_at = times.given = 1.0
    times.gate_s = times.unread_s = 0.0
    last = StreamRecord(given=5.0, returned=6.0, times=EngineTimes({TimeCause.DECODE: 1.0}))
    found = wall_seconds(times, 6.0, last, StreamRecord(given=1.0, returned=8.0, times=told))
    causes = {cause: value for cause, value in found.items() if value > 1e-9}
    assert causes == pytest.approx({TimeCause.QUEUE: 3.0, TimeCause.PREFILL: 1.0, TimeCause.DECODE: 1.0})


async def test_a_client_that_is_given_up_because_it_reads_nothing_is_named(leap: Leap) -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("Bon"), asyncio.Event()))
    exchange = post(app, STREAM, ("x-request-id", "stalled"))
    exchange.may_send.clear()
    await until(lambda: exchange.has_sent)
    leap()
    exchange.broken = True
    exchange.may_send.set()
    await asyncio.wait([exchange.task])
    assert await first_cause(app, "stalled") == "client"


async def test_a_client_that_leaves_before_its_turn_learns_that_it_waited(leap: Leap) -> None:
    app = app_for(client := ScriptedClient(asyncio.Event()))
    exchange = post(app, STREAM, ("x-request-id", "left"))
    await client.started.wait()
    leap()
    exchange.disconnect()
    await asyncio.wait([exchange.task])
    assert await first_cause(app, "left") == "queue"


async def test_an_answer_that_a_stop_string_ended_is_explained_once_its_engine_has_told() -> None:
    recent, record = RecentTimes(), StreamRecord(is_complete=True)
    times = RequestTimes()
    times.has_body()
    times.given_to_engine()
    record.given = record.returned = times.now()
    recent.add(EndedTimes("id", "r", "complete", times, times.now(), record), "")
    asked = asyncio.ensure_future(recent.find("id", ""))
    await asyncio.sleep(0)
    record.times = EngineTimes({TimeCause.DECODE: 1.0}, 7, 70)
    found = await asked
    assert found is not None
    assert found.ahead is not None
    assert found.ahead.requests == 7


async def test_engines_that_are_lost_one_after_the_other_are_a_migration_even_if_none_goes_on(leap: Leap) -> None:
    lost = EngineError(ErrorCode.ENGINE_DEAD, "")
    scripts: list[list[Step]] = [[[scheduled()], tokens("Bon"), lost], [leap, lost]]
    record = StreamRecord()
    submission = Submission("r", (1, 2, 3), SamplingParams(max_tokens=9))
    with pytest.raises(EngineError):
        async for _ in Migration(1, 60.0, 4096).stream(submission, lambda *_: _Call(scripts.pop(0)), record):
            pass
    assert record.lost_s == pytest.approx(LONG_S, abs=1)
