"""Owns the contract of failures and of clients that leave: what is answered, and that the engine's stream is closed.
Never sleeps: everything waits for an event."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle

import pytest

from engine.protocol import EngineError, ErrorCode, FinishReason, RequestRejected
from serve_app.api.http.asgi import RequestGuard
from serve_app.errors.api_error import ENGINE_RULES
from tests.serve_app.harness import (
    CHAT,
    PROMPT,
    TIMEOUT_S,
    Exchange,
    ScriptedClient,
    app_for,
    chat,
    failed,
    finished,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

EXPECTED = {
    ErrorCode.EMPTY_PROMPT: (400, "invalid_request_error", "empty_prompt"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.KV_CAPACITY_EXCEEDED: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.INVALID_PARAMETER: (400, "invalid_request_error", "invalid_value"),
    ErrorCode.QUEUE_FULL: (503, "server_overloaded", "queue_full"),
    ErrorCode.DRAINING: (503, "service_unavailable", "draining"),
    ErrorCode.DEADLINE_EXCEEDED: (504, "timeout", "deadline_exceeded"),
    ErrorCode.PREPARATION_FAILED: (500, "server_error", "preparation_failed"),
    ErrorCode.ADAPTER_UNAVAILABLE: (503, "server_error", "adapter_unavailable"),
    ErrorCode.ADAPTER_WITHDRAWN: (409, "invalid_request_error", "adapter_withdrawn"),
    ErrorCode.GRAMMAR_LIMIT_EXCEEDED: (400, "invalid_request_error", "grammar_limit_exceeded"),
    ErrorCode.STEP_FAILED: (500, "server_error", "step_failed"),
    ErrorCode.ENGINE_DEAD: (503, "server_error", "engine_dead"),
}


def test_every_engine_code_has_a_rule() -> None:
    assert set(ENGINE_RULES) == set(ErrorCode) == set(EXPECTED)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", list(ErrorCode))
async def test_a_refusal_by_the_engine_is_a_real_status_streamed_or_not(code: ErrorCode, stream: bool) -> None:
    rejection = pickle.loads(pickle.dumps(RequestRejected(code, "no " * 1000, param="prompt", limit=10, value=20)))
    answer = await chat(ScriptedClient(rejection), stream=stream)
    assert (answer.status, answer.error["type"], answer.error["code"]) == EXPECTED[code]
    assert ("retry-after" in answer.headers) == (answer.status == 503)
    futile = code in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.ADAPTER_WITHDRAWN)
    assert (answer.headers.get("x-should-retry") == "false") == futile
    assert len(answer.error["message"]) <= 1000
    if code in (ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.KV_CAPACITY_EXCEEDED):
        assert "maximum context length" in answer.error["message"]
        assert answer.error["n_ctx"] == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_event_is_a_status(stream: bool) -> None:
    fault = EngineError(ErrorCode.STEP_FAILED, "CUDA error at /usr/lib/secret.so")
    for client in (ScriptedClient(fault), ScriptedClient([failed(fault)])):
        answer = await chat(client, stream=stream)
        assert (answer.status, answer.error["code"]) == (500, "step_failed")
        assert "secret" not in answer.error["message"]


@pytest.mark.parametrize("raised", [False, True])
async def test_a_failure_in_mid_stream_is_an_error_frame_and_then_done(raised: bool) -> None:
    fault = EngineError(ErrorCode.ENGINE_DEAD, "/secret")
    client = ScriptedClient([scheduled()], tokens("par"), fault if raised else [*tokens("tial"), failed(fault)])
    answer = await chat(client, stream=True)
    assert answer.status == 200
    assert answer.frames[-1] == {
        "error": {
            "message": "The engine is not running.",
            "type": "server_error",
            "param": None,
            "code": "engine_dead",
        }
    }
    assert answer.text == "par"
    assert client.closed.is_set()


async def test_a_failure_after_text_is_a_status_when_the_answer_is_not_streamed() -> None:
    client = ScriptedClient(tokens("partial"), EngineError(ErrorCode.STEP_FAILED, "x"))
    assert (await chat(client)).status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_that_no_client_asked_for_is_an_error_not_an_answer(stream: bool) -> None:
    answer = await chat(ScriptedClient([scheduled(), finished(FinishReason.ABORT)]), stream=stream)
    assert (answer.status, answer.error["code"]) == (503, "aborted")


async def test_a_stream_without_an_end_is_an_error() -> None:
    assert (await chat(ScriptedClient([scheduled()], tokens("a")))).status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_logged_500_that_shows_nothing(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = await chat(ScriptedClient(KeyError("/secret")), stream=stream)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "secret" not in answer.error["message"]
    assert "/secret" in caplog.text


async def test_a_bug_in_mid_stream_is_an_error_frame() -> None:
    answer = await chat(ScriptedClient([scheduled()], KeyError("x")), stream=True)
    assert answer.frames[-1]["error"]["code"] == "internal_error"


# --- clients that leave ---------------------------------------------------------------------------------------------


def begin(client: ScriptedClient, stream: bool) -> Exchange:
    body = json.dumps(CHAT | {"stream": stream}).encode()
    return Exchange(app_for(client), "POST", "/v1/chat/completions", body)


async def closed(client: ScriptedClient) -> None:
    await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_event_aborts_its_request(stream: bool) -> None:
    client = ScriptedClient(asyncio.Event())
    exchange = begin(client, stream)
    await client.started.wait()
    exchange.disconnect()
    await closed(client)
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert exchange.silent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_between_two_tokens_aborts_its_request(stream: bool) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    exchange = begin(client, stream)
    await client.started.wait()
    if stream:
        while b'"content":"a"' not in (await exchange.next()).get("body", b""):
            pass
    exchange.disconnect()
    await closed(client)
    await asyncio.wait_for(exchange.task, TIMEOUT_S)


async def test_a_client_that_leaves_while_its_connection_is_full_aborts_its_request() -> None:
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    exchange = begin(client, stream=True)
    exchange.may_send.clear()
    await client.started.wait()
    exchange.disconnect()
    await closed(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_takes_nothing_of_its_answer_for_too_long_is_given_up(stream: bool) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    app = app_for(client, client_stall_timeout_s=0.05)
    exchange = Exchange(app, "POST", "/v1/completions", json.dumps(PROMPT | {"stream": stream}).encode())
    exchange.may_send.clear()
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert client.closed.is_set()
    assert exchange.silent


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_the_asgi_task_as_ray_serve_does_aborts_the_request(stream: bool) -> None:
    client = ScriptedClient([scheduled()], asyncio.Event())
    exchange = begin(client, stream)
    await client.started.wait()
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    assert client.closed.is_set()


async def test_a_server_that_reports_the_lost_client_by_an_error_of_send_aborts_the_request() -> None:
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    exchange = begin(client, stream=True)
    exchange.broken = True
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert client.closed.is_set()


async def test_a_lost_client_is_no_error_when_the_answer_would_have_been_one() -> None:
    exchange = begin(ScriptedClient(KeyError("x")), stream=True)
    exchange.broken = True
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert exchange.silent


async def test_a_client_that_leaves_while_it_sends_its_body_is_not_answered() -> None:
    client = ScriptedClient()
    exchange = begin(client, stream=False)
    exchange._inbox.get_nowait()
    exchange._inbox.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    exchange.disconnect()
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert exchange.silent
    assert not client.submissions


async def test_a_failure_after_the_headers_outside_a_stream_cuts_the_connection() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        raise KeyError

    with pytest.raises(KeyError):
        await Exchange(RequestGuard(app, stall_timeout_s=60), "GET", "/").finish()
