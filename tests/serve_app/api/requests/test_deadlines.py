"""Owns the contract of request deadlines: how they are asked for, what they end and when,
and that nothing outlives them.
Never waits for real seconds where a clock can be turned."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from engine.protocol import EngineError, ErrorCode
from serve_app.api.ingress import create_app
from serve_app.api.openai.choices import MAX_AT_ONCE
from serve_app.api.requests.deadline import MAX_TIMEOUT_MS
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    LocalClient,
    ScriptedClient,
    app_for,
    failed,
    finished,
    make_time_pass,
    scheduled,
    tokens,
)
from tests.support.conditions import until

pytestmark = pytest.mark.anyio

ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]


async def post(app: Any, path: str, body: dict[str, Any], header: str | None = None) -> Answer:
    headers = [("content-type", "application/json")] + ([("Request-Timeout-Ms", header)] if header is not None else [])
    return await Exchange(app, "POST", path, json.dumps(body).encode(), headers).finish()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("header", "field", "most_s"),
    [("4000", None, 4.0), (None, 3000, 3.0), ("4000", 3000, 3.0), (" 2000 ", 3000, 2.0)],
)
async def test_the_engine_gets_what_is_left_of_the_sooner_deadline(
    path: str, body: dict[str, Any], header: str | None, field: int | None, most_s: float
) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    answer = await post(app_for(client), path, body | ({} if field is None else {"timeout_ms": field}), header)
    assert answer.status == 200
    (submission,) = client.submissions
    assert submission.timeout_s is not None
    assert most_s - 1 < submission.timeout_s < most_s, "the time that reading and tokenizing took is gone"


EMBEDDINGS = {"model": MODEL.id, "input": ["a"] * (MAX_AT_ONCE + 1)}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT | {"n": 2}), ("/v1/embeddings", EMBEDDINGS)])
async def test_what_follows_other_parts_of_its_request_has_only_the_time_that_they_left(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: inputs beyond the first 128, and answers that waited for the prompt, got the time from before."""
    client = ScriptedClient([scheduled()], make_time_pass(3, monkeypatch), tokens("a"), [finished()])
    answer = await post(app_for(client, model=replace(MODEL, pooling="mean")), path, body | {"timeout_ms": 5000})
    assert answer.status == 200
    first, last = client.submissions[0].timeout_s, client.submissions[-1].timeout_s
    assert first is not None
    assert last is not None
    assert 4 < first < 5
    assert last < 2


async def test_inputs_whose_turn_comes_after_the_deadline_reach_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient([scheduled()], make_time_pass(5.5, monkeypatch), [finished()])
    app = app_for(client, model=replace(MODEL, pooling="mean"))
    answer = await post(app, "/v1/embeddings", EMBEDDINGS | {"timeout_ms": 5000})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert len(client.submissions) < len(EMBEDDINGS["input"])


async def test_without_a_deadline_a_request_may_take_as_long_as_it_likes() -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    assert (await post(app_for(client), "/v1/completions", PROMPT | {"timeout_ms": None})).status == 200
    assert client.submissions[0].timeout_s is None


@pytest.mark.parametrize("header", ["", "soon", "0", "-5", "1.5", "1e3", "٣", str(MAX_TIMEOUT_MS + 1), "9" * 400])
async def test_a_header_that_is_no_number_of_milliseconds_is_refused_by_name(header: str) -> None:
    client = ScriptedClient()
    answer = await post(app_for(client), "/v1/completions", PROMPT, header)
    assert (answer.status, answer.error["param"]) == (400, "Request-Timeout-Ms")
    assert str(MAX_TIMEOUT_MS) in answer.error["message"]
    assert len(answer.error["message"]) < 300
    assert client.submissions == []


@pytest.mark.parametrize("value", [0, -1, 1.5, "1000", True, MAX_TIMEOUT_MS + 1])
async def test_a_field_that_is_no_number_of_milliseconds_is_refused_by_name(value: object) -> None:
    answer = await post(app_for(ScriptedClient()), "/v1/completions", PROMPT | {"timeout_ms": value})
    assert (answer.status, answer.error["param"]) == (400, "timeout_ms")


async def test_a_deadline_that_passed_while_the_request_was_read_reaches_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.api.ingress.now", lambda: 100.0)  # when it came
    monkeypatch.setattr("serve_app.api.requests.deadline.now", lambda: 100.6)  # when it was read
    client = ScriptedClient([scheduled()], [finished()])
    answer = await post(app_for(client), "/v1/completions", PROMPT, "500")
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert "0.5 s" in answer.error["message"]
    assert client.submissions == []


async def test_a_deadline_that_the_engine_knows_it_cannot_keep_is_told_with_its_reason() -> None:
    """Regression: a request that was refused at once was told that it had ended when its time was up."""
    at_once = EngineError(ErrorCode.DEADLINE_EXCEEDED, "The request was ended at once: its prompt takes about 9.0 s.")
    answer = await post(app_for(ScriptedClient([failed(at_once)])), "/v1/completions", PROMPT, "60000")
    assert (answer.status, answer.error["code"], answer.error["message"]) == (504, "deadline_exceeded", at_once.message)


LATE = EngineError(ErrorCode.DEADLINE_EXCEEDED, "The request was ended after 1.0 s, as its deadline says.")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_late_before_its_first_token_is_a_504_that_nobody_should_retry(stream: bool) -> None:
    answer = await post(app_for(ScriptedClient([failed(LATE)])), "/v1/completions", PROMPT | {"stream": stream}, "1000")
    assert (answer.status, answer.error["type"], answer.error["code"]) == (504, "timeout", "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_stream_that_is_late_ends_with_an_error_frame() -> None:
    client = ScriptedClient([scheduled()], tokens("abc"), [failed(LATE)])
    answer = await post(app_for(client), "/v1/completions", PROMPT | {"stream": True}, "1000")
    assert answer.status == 200
    assert answer.text == "abc"
    assert answer.frames[-1]["error"]["code"] == "deadline_exceeded"


async def test_the_error_names_what_the_client_asked_for_and_not_what_the_engine_had_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = EngineError(ErrorCode.DEADLINE_EXCEEDED, "The request was ended after 0.69814 s, as its deadline says.")
    client = ScriptedClient(make_time_pass(0.7, monkeypatch), [failed(left)])
    answer = await post(app_for(client), "/v1/completions", PROMPT, "700")
    assert answer.error["message"] == "The request was ended after 0.7 s, as its deadline says."


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_does_not_keep_the_deadline_is_left(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.api.generation.live.GRACE_S", 0.0)
    client = ScriptedClient(make_time_pass(5, monkeypatch), asyncio.Event())
    answer = await post(app_for(client), "/v1/completions", PROMPT | {"stream": stream}, "5000")
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert client.closed.is_set(), "the request is cancelled wherever it is"


def slow_engine() -> AsyncEngine:
    return build_engine("", EngineConfig(executor="fake", max_num_seqs=1, fake=FakeConfig(step_delay_ms=20)))


async def test_a_late_stream_and_a_late_queued_request_leave_nothing_in_the_engine() -> None:
    engine = slow_engine()
    try:
        app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL)
        body = PROMPT | {"max_tokens": 190, "ignore_eos": True, "stream": True}
        running = asyncio.ensure_future(post(app, "/v1/completions", body, "1000"))
        await until(lambda: engine.load().num_running > 0)
        queued = await post(app, "/v1/completions", body | {"stream": False}, "100")
        assert (queued.status, queued.error["code"]) == (504, "deadline_exceeded")
        late = await asyncio.wait_for(running, TIMEOUT_S)
        assert late.frames[-1]["error"]["code"] == "deadline_exceeded"
        assert 0 < len(late.text) < 190
        await until(lambda: not engine.load().num_held_blocks)
        answer = await post(app, "/v1/completions", PROMPT | {"max_tokens": 2}, "5000")
        assert answer.status == 200
    finally:
        engine.shutdown()
