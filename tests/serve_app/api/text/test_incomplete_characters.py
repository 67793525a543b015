"""Owns the contract of answers that end inside a character:
on every route their text is that of decoding all tokens at once.
Never depends on a real engine: every event is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engine.protocol import EngineError, ErrorCode, Event, FinishReason, Submission
from serve_app.channel import migration
from serve_app.channel.migration import Migration
from serve_app.engines.engine_client import StreamRecord
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Answer,
    ScriptedClient,
    app_for,
    complete,
    finished,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

PARROT = "🦜".encode()
CUT = b"a" + PARROT[:3]
WHOLE = "a\ufffd"
LENGTH = finished(FinishReason.LENGTH, completion=4)
MESSAGE: dict[str, Any] = {"model": MODEL.id, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def cut_off(end: Event = LENGTH) -> ScriptedClient:
    return ScriptedClient([scheduled()], tokens(CUT[:2]), tokens(CUT[2:]), [end])


def events(answer: Answer) -> list[dict[str, Any]]:
    lines = b"".join(answer.parts).decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("end", [LENGTH, finished()], ids=["length", "stop token"])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
async def test_a_chat_or_completion_ends_as_a_whole_decode_does(path: str, body: dict[str, Any], end: Event) -> None:
    choice = (await post(app_for(cut_off(end)), path, body)).json["choices"][0]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == WHOLE
    assert (await post(app_for(cut_off(end)), path, body | {"stream": True})).text == WHOLE


async def test_a_response_ends_as_a_whole_decode_does() -> None:
    body = {"model": MODEL.id, "input": "hi"}
    told = (await post(app_for(cut_off()), "/v1/responses", body)).json
    assert told["output"][0]["content"][0]["text"] == WHOLE
    streamed = events(await post(app_for(cut_off()), "/v1/responses", body | {"stream": True}))
    assert "".join(event["delta"] for event in streamed if event["type"].endswith("text.delta")) == WHOLE
    assert streamed[-1]["response"]["output"][0]["content"][0]["text"] == WHOLE


async def test_a_message_ends_as_a_whole_decode_does() -> None:
    told = (await post(app_for(cut_off()), "/v1/messages", MESSAGE)).json
    assert (told["content"][0]["text"], told["stop_reason"]) == (WHOLE, "max_tokens")
    streamed = events(await post(app_for(cut_off()), "/v1/messages", MESSAGE | {"stream": True}))
    deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == WHOLE


async def test_what_waits_may_hold_the_beginning_of_a_stop_string_or_be_one() -> None:
    client = ScriptedClient([scheduled()], tokens(b"xS" + PARROT[:1]), [LENGTH])
    assert (await complete(client, stop="STOP")).json["choices"][0]["text"] == "xS\ufffd"
    choice = (await complete(client, stop="S\ufffd")).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("x", "stop")
    streamed = await complete(client, stop="S\ufffd", stream=True)
    assert (streamed.text, streamed.frames[-1]["choices"][0]["finish_reason"]) == ("x", "stop")


async def test_a_stop_token_that_is_shown_comes_after_what_waited() -> None:
    fields: dict[str, Any] = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    client = cut_off(finished(FinishReason.STOP))
    assert (await complete(client, **fields)).json["choices"][0]["text"] == f"{WHOLE}<eos>"


async def test_an_echo_that_ends_inside_a_character_does_too() -> None:
    client = ScriptedClient([scheduled()], [finished(FinishReason.LENGTH, completion=0)])
    choice = (await complete(client, prompt=list(CUT), echo=True, max_tokens=0)).json["choices"][0]
    assert choice["text"] == WHOLE


class _Attempt:
    """The part of an answer that one engine replica sends.
    Then the replica is gone, unless the last event ended the answer."""

    def __init__(self, *script: list[Event]) -> None:
        self.replica_id = "engine"
        self._items = iter(script)

    async def take(self) -> list[Event]:
        for item in self._items:
            return item
        raise EngineError(ErrorCode.ENGINE_DEAD, "gone")

    def close(self, *, complete: bool = False) -> None:
        return


class _MovingClient(ScriptedClient):
    """Each list of items is what one engine replica sends before the next replica continues."""

    def __init__(self, *parts: list[list[Event]]) -> None:
        super().__init__()
        self._parts = parts

    async def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        attempts = iter([_Attempt(*part) for part in self._parts])
        moves = Migration(max_migrations=3, timeout_s=10, max_model_len=200)
        async for item in moves.stream(submission, lambda rest, avoid: next(attempts), record):
            yield item


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("data", "text"), [(PARROT, "🦜"), (PARROT[:3], "\ufffd"), (PARROT[:2] + b"b", "\ufffdb")])
async def test_a_character_that_two_engines_make_is_whole_or_ends_as_one_engines_would(
    monkeypatch: pytest.MonkeyPatch, stream: bool, data: bytes, text: str
) -> None:
    monkeypatch.setattr(migration, "FIRST_BACKOFF_S", 0)
    client = _MovingClient([[scheduled()], tokens(data[:1])], [[scheduled()], tokens(data[1:]), [LENGTH]])
    answer = await complete(client, stream=stream)
    assert (answer.text if stream else answer.json["choices"][0]["text"]) == text
