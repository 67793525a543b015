"""Owns the contract of what generation responses carry besides the answer: how long they took, and keep-alive comments.
Never asserts how long something took: a comment is waited for, and its absence is checked where none can come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.protocol import EngineError, ErrorCode, RequestRejected
from loadtest.sim.virtual_loop import VirtualLoop
from serve_app.api.http.asgi import ClientGone
from serve_app.api.http.generation_response import GenerationResponses
from serve_app.api.http.keep_alive import COMMENT, KeepAlive
from tests.serve_app.harness import (
    CHAT,
    PROMPT,
    TIMEOUT_S,
    Exchange,
    ScriptedClient,
    app_for,
    chat,
    complete,
    finished,
    get,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio
SOON_S = 0.001
HEADER = "openai-processing-ms"
FRAME: Message = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Use a clock that moves only when everybody waits for it, so that a silence lasts as long as a test says,
    on every machine."""
    return "asyncio", {"loop_factory": VirtualLoop}


def begin(client: ScriptedClient, keep_alive_s: float = SOON_S, **fields: Any) -> Exchange:
    app = app_for(client, sse_keep_alive_s=keep_alive_s)
    return Exchange(app, "POST", "/v1/completions", json.dumps(PROMPT | fields).encode())


async def bodies_until(exchange: Exchange, text: bytes) -> list[bytes]:
    """Return the messages' bodies, up to one that has `text`."""
    seen = [b""]
    while text not in seen[-1]:
        seen.append((await exchange.next()).get("body", b""))
    return seen


# --- openai-processing-ms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_how_long_it_took_to_begin(stream: bool) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    for answer in (await chat(client, stream=stream), await complete(client, stream=stream)):
        assert answer.status == 200
        assert int(answer.headers[HEADER]) >= 0


@pytest.mark.parametrize(
    ("client", "fields", "status"),
    [
        (ScriptedClient(), {"temperature": 9}, 400),
        (ScriptedClient(), {"model": "other"}, 404),
        (ScriptedClient(RequestRejected(ErrorCode.QUEUE_FULL, "full")), {"stream": True}, 503),
        (ScriptedClient(EngineError(ErrorCode.STEP_FAILED, "x")), {"stream": True}, 500),
        (ScriptedClient(KeyError("x")), {}, 500),
    ],
)
async def test_a_refusal_is_what_it_was_and_says_how_long_it_took(
    client: ScriptedClient, fields: dict[str, Any], status: int
) -> None:
    answer = await chat(client, **fields)
    assert answer.status == status
    assert answer.error["message"]
    assert int(answer.headers[HEADER]) >= 0
    assert len(answer.headers["x-request-id"]) == 32


async def test_other_routes_do_not_say_it() -> None:
    assert HEADER not in (await get(ScriptedClient(), "/v1/models")).headers


# --- keep-alive -----------------------------------------------------------------------------------------------------


async def test_a_silent_stream_gets_comments_between_its_frames_and_the_answer_is_the_same() -> None:
    go_on = asyncio.Event()
    client = ScriptedClient([scheduled()], tokens("a"), go_on, tokens("b"), [finished()])
    exchange = begin(client, stream=True)
    first = await bodies_until(exchange, b'"text":"a"')
    for _ in range(2):
        first += await bodies_until(exchange, COMMENT)
    go_on.set()
    last = await bodies_until(exchange, b"[DONE]")
    parts = [part for part in first + last if part]
    assert all(part == COMMENT or part.startswith(b"data: ") for part in parts)
    assert all(part.endswith(b"\n\n") for part in parts)
    frames = [json.loads(part[6:]) for part in parts if part != COMMENT and b"[DONE]" not in part]
    assert "".join(frame["choices"][0]["text"] for frame in frames) == "ab"
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert parts[-1] == b"data: [DONE]\n\n"
    assert exchange.silent, "nothing after the end"


async def test_a_comment_is_sent_once_the_silence_has_lasted_long_enough_and_a_frame_ends_it() -> None:
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message["body"])

    alive = KeepAlive(send, 60)

    async def look_after(silence_s: float) -> list[bytes]:
        alive._last_sent -= silence_s
        alive._look()
        await asyncio.sleep(0)
        return sent

    assert await look_after(59) == []
    await alive.send(FRAME)
    assert await look_after(59) == [FRAME["body"]]
    assert await look_after(1) == [FRAME["body"], COMMENT]
    assert await look_after(59) == [FRAME["body"], COMMENT]
    assert await look_after(1) == [FRAME["body"], COMMENT, COMMENT]
    await alive.close()


async def test_before_the_engine_has_accepted_a_request_nothing_is_sent_and_its_refusal_is_a_status() -> None:
    decide = asyncio.Event()
    client = ScriptedClient(decide, RequestRejected(ErrorCode.QUEUE_FULL, "full"))
    exchange = begin(client, stream=True)
    await client.started.wait()
    await asyncio.sleep(10 * SOON_S)
    assert exchange.silent
    decide.set()
    answer = await exchange.finish()
    assert (answer.status, answer.error["code"]) == (503, "queue_full")


async def test_an_answer_that_is_no_stream_gets_no_comment() -> None:
    go_on = asyncio.Event()
    client = ScriptedClient([scheduled()], tokens("a"), go_on, [finished()])
    exchange = begin(client)
    await client.started.wait()
    await asyncio.sleep(10 * SOON_S)
    go_on.set()
    assert (await exchange.finish()).json["choices"][0]["text"] == "a"


async def test_zero_turns_the_comments_off() -> None:
    go_on = asyncio.Event()
    exchange = begin(ScriptedClient([scheduled()], tokens("a"), go_on, [finished()]), keep_alive_s=0, stream=True)
    await bodies_until(exchange, b'"text":"a"')
    await asyncio.sleep(10 * SOON_S)
    go_on.set()
    assert COMMENT not in await bodies_until(exchange, b"[DONE]")


async def test_while_a_frame_is_on_its_way_there_is_no_comment() -> None:
    """Two messages being sent at a time would be two writers on one connection."""
    sent: list[bytes] = []
    may_send = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message["body"])
        await may_send.wait()

    alive = KeepAlive(send, SOON_S)
    frame = asyncio.ensure_future(alive.send(FRAME))
    await asyncio.sleep(10 * SOON_S)
    assert sent == [FRAME["body"]]
    may_send.set()
    await asyncio.wait_for(frame, TIMEOUT_S)
    await alive.close()


async def test_a_frame_waits_for_the_comment_that_is_on_its_way() -> None:
    log: list[tuple[str, bytes]] = []
    may_send, on_its_way = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        log.append(("begins", message["body"]))
        on_its_way.set()
        await may_send.wait()
        log.append(("ends", message["body"]))

    alive = KeepAlive(send, SOON_S)
    await asyncio.wait_for(on_its_way.wait(), TIMEOUT_S)
    frame = asyncio.ensure_future(alive.send(FRAME))
    await asyncio.sleep(0)
    may_send.set()
    await asyncio.wait_for(frame, TIMEOUT_S)
    await alive.close()
    assert log[:4] == [(when, body) for body in (COMMENT, FRAME["body"]) for when in ("begins", "ends")]


async def test_a_client_that_left_during_a_comment_is_gone_for_the_next_frame() -> None:
    tried = asyncio.Event()

    async def send(message: Message) -> None:
        tried.set()
        if message["body"] == COMMENT:
            raise ClientGone

    alive = KeepAlive(send, SOON_S)
    await asyncio.wait_for(tried.wait(), TIMEOUT_S)
    with pytest.raises(ClientGone):
        await alive.send(FRAME)
    await alive.close()


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
async def test_a_stream_that_is_given_up_in_a_comment_leaves_no_timer_and_no_task(how: str) -> None:
    before = asyncio.all_tasks()
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    exchange = begin(client, stream=True)
    await bodies_until(exchange, COMMENT)
    exchange.may_send.clear()  # the next comment is never fully sent
    await asyncio.sleep(5 * SOON_S)
    if how == "leaves":
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, TIMEOUT_S)
    else:
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
    assert client.closed.is_set()
    assert asyncio.all_tasks() == before


async def test_a_client_that_takes_no_comment_is_given_up_like_one_that_takes_no_frame() -> None:
    client = ScriptedClient([scheduled()], tokens("a"), go_on := asyncio.Event(), tokens("b"), [finished()])
    app = app_for(client, sse_keep_alive_s=SOON_S, client_stall_timeout_s=0.05)
    exchange = Exchange(app, "POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": True}).encode())
    await bodies_until(exchange, COMMENT)
    exchange.may_send.clear()
    await asyncio.sleep(0.15)
    go_on.set()
    await asyncio.wait_for(exchange.task, TIMEOUT_S)
    assert client.closed.is_set()


async def test_a_closed_one_sends_nothing_more() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await KeepAlive(send, SOON_S).close()
    await asyncio.sleep(10 * SOON_S)
    assert sent == []


def start(content_type: bytes) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


async def play(*messages: Message) -> list[bytes]:
    """Return what a client gets from a route that sends these messages, and is silent after each."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
            await asyncio.sleep(10 * SOON_S)

    return (await Exchange(GenerationResponses(route, SOON_S), "POST", "/").finish()).parts


async def test_comments_are_for_event_streams_alone_and_end_with_the_last_message() -> None:
    last: Message = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
    assert await play(start(b"application/json"), FRAME, last) == [FRAME["body"], last["body"]]
    parts = await play(start(b"text/event-stream; charset=utf-8"), FRAME, last)
    assert [part for part in parts if part != COMMENT] == [FRAME["body"], last["body"]]
    assert parts[0] == COMMENT
    assert parts[-1] == last["body"]
