"""Owns the promise that a request, however it ends, leaves nothing for the garbage collector. Collecting something
large stops every stream of an ingress replica, for seconds where it held 100,000 messages.
Never measures time, nor memory."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.protocol import EngineError, ErrorCode, FinishReason
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Exchange,
    ScriptedClient,
    app_for,
    failed,
    finished,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

TURNS = [{"role": "user", "content": "hello there"}] * 2000
LONG = "hello there " * 2000
FAULT = EngineError(ErrorCode.STEP_FAILED, "x")
BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/chat/completions", CHAT | {"messages": TURNS}, 400),
    ("/v1/chat/completions", CHAT | {"seed": "x"}, 400),
    ("/v1/chat/completions", CHAT | {"unknown": 1}, 400),
    ("/v1/chat/completions", CHAT | {"model": "other"}, 404),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": LONG}]}, 400),
    ("/v1/completions", PROMPT, 200),
    ("/v1/completions", PROMPT | {"prompt": LONG}, 400),
    ("/v1/completions", PROMPT | {"regex": "("}, 400),
    ("/v1/messages", CHAT | {"max_tokens": 5}, 200),
    ("/v1/messages", CHAT | {"max_tokens": 5, "messages": TURNS}, 400),
    ("/v1/messages/count_tokens", CHAT | {"messages": TURNS}, 200),
    ("/v1/responses", {"model": MODEL.id, "input": "hi"}, 200),
    ("/v1/responses", {"model": MODEL.id, "input": LONG}, 400),
    ("/v1/responses", {"model": MODEL.id, "input": TURNS}, 400),
    ("/tokenize", {"prompt": LONG}, 200),
    ("/tokenize", {"messages": TURNS}, 200),
    ("/detokenize", {"tokens": [1] * 5000}, 200),
    ("/detokenize", {"tokens": [10**6]}, 400),
]
WHOLE = ([scheduled()], [*tokens("hello"), finished()])


@contextmanager
def no_garbage() -> Iterator[None]:
    gc.freeze()  # what exists already is not looked at, which would take seconds
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = sorted({type(one).__name__ for one in gc.garbage})
        assert not found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "status"), BODIES, ids=lambda value: str(value)[:50])
async def test_an_answer_and_a_refusal_leave_nothing(
    path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    if stream and ("tokenize" in path or "count" in path):
        return
    app = app_for(ScriptedClient(*WHOLE))
    body = body | {"stream": True} if stream else body
    assert (await post(app, path, body)).status == status  # the first request makes what lives as long as the process
    with no_garbage():
        assert (await post(app, path, body)).status == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        (FAULT,),
        ([scheduled()], FAULT),
        ([scheduled()], tokens("a"), FAULT),
        ([scheduled()], [*tokens("a"), failed(FAULT)]),
        ([scheduled()], [*tokens("a"), finished(FinishReason.LENGTH)]),
    ],
    ids=["refused", "lost at once", "lost in the middle", "failed", "cut off"],
)
async def test_an_answer_that_an_engine_ends_leaves_nothing(script: Any, stream: bool) -> None:
    app, body = app_for(ScriptedClient(*script)), CHAT | {"stream": stream}
    await post(app, "/v1/chat/completions", body)
    with no_garbage():
        await post(app, "/v1/chat/completions", body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_leaves_no_garbage(stream: bool) -> None:
    """If Ray reports it by cancelling, asyncio's own waits leave a cycle."""
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    app, body = app_for(client), json.dumps(CHAT | {"stream": stream}).encode()

    async def leave() -> None:
        client.started.clear()
        exchange = Exchange(app, "POST", "/v1/chat/completions", body)
        await client.started.wait()
        exchange.disconnect()
        await asyncio.wait([exchange.task])
        exchange.task.exception()

    await leave()
    with no_garbage():
        await leave()
