"""Owns the contract of answers, whole and streamed: their frames, their text, their usage.
Never depends on a real engine: every event is scripted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.protocol import EngineError, ErrorCode, FinishReason
from tests.serve_app.harness import (
    CHAT,
    EOS,
    MODEL,
    TIMEOUT_S,
    UNASKED,
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

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def _json_bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def hello() -> ScriptedClient:
    return ScriptedClient([scheduled(4)], tokens("Hel"), tokens("lo"), [finished(cached=4)])


async def test_a_chat_answer_is_openais_object() -> None:
    body = (await chat(hello())).json
    ChatCompletion.model_validate(body, strict=True)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL.id)
    message = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": []}
    message |= {"reasoning": None, "reasoning_content": None}
    choice = {"index": 0, "message": message, "logprobs": None, "token_ids": None, "finish_reason": "stop"}
    assert body["choices"] == [choice | EOS]
    assert (body["prompt_token_ids"], body["prompt_logprobs"]) == (None, None)
    assert body["usage"] == USAGE


async def test_a_completion_is_openais_object() -> None:
    body = (await complete(hello())).json
    Completion.model_validate(body, strict=True)
    assert body["id"].startswith("cmpl-")
    choice = {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [choice | EOS | UNASKED]
    assert body["usage"] == USAGE


async def test_a_chat_stream_begins_with_the_role_ends_with_the_reason_and_keeps_one_id() -> None:
    answer = await chat(hello(), stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    for frame in answer.frames:
        ChatCompletionChunk.model_validate(frame, strict=True)
        assert "usage" not in frame
    assert len({frame["id"] for frame in answer.frames}) == 1
    choices = [choice for frame in answer.frames for choice in frame["choices"]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]


async def test_a_completion_stream_has_no_opening_frame() -> None:
    frames = (await complete(hello(), stream=True)).frames
    for frame in frames[:-1]:
        assert frame["choices"][0]["finish_reason"] is None
    Completion.model_validate(frames[-1], strict=True)
    assert [frame["choices"][0]["text"] for frame in frames] == ["Hel", "lo", ""]


async def test_text_that_arrives_with_the_end_rides_in_the_last_frame() -> None:
    frames = (await chat(ScriptedClient([scheduled()], [*tokens("Hi"), finished()]), stream=True)).frames
    assert frames[-1]["choices"][0]["delta"] == {"content": "Hi"}
    assert frames[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("send", [chat, complete])
async def test_usage_comes_in_a_last_frame_without_choices_when_asked_for(send: Any) -> None:
    frames = (await send(hello(), stream=True, stream_options={"include_usage": True})).frames
    assert (frames[-1]["choices"], frames[-1]["usage"]) == ([], USAGE)
    assert all(frame["usage"] is None for frame in frames[:-1])


async def test_an_end_by_length_is_reported_as_length() -> None:
    client = ScriptedClient([*tokens("ab"), finished(FinishReason.LENGTH)])
    assert (await chat(client)).json["choices"][0]["finish_reason"] == "length"


async def test_an_answer_without_a_token_is_empty_and_complete() -> None:
    client = ScriptedClient([scheduled(), finished(completion=1)])
    assert (await chat(client)).json["choices"][0]["message"]["content"] == ""
    frames = (await chat(client, stream=True)).frames
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None, "stop"]


async def test_frames_are_ascii_so_that_no_client_cuts_one_at_a_unicode_line_break() -> None:
    text = "a\u2028b\x85c\x0bd 🦜"
    answer = await chat(ScriptedClient(tokens(text), [finished()]), stream=True)
    assert answer.text == text
    assert all(part.isascii() and len(part.decode().splitlines()) == 2 * part.count(b"\n\n") for part in answer.parts)


async def test_a_character_cut_by_items_is_never_sent_in_parts() -> None:
    data = "né🦜".encode()
    client = ScriptedClient(*[tokens(data[at : at + 1]) for at in range(len(data))], [finished()])
    answer = await chat(client, stream=True)
    assert [f["choices"][0]["delta"].get("content") for f in answer.frames] == ["", "n", "é", "🦜", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunks", [["one two STOP three"], ["one two S", "TO", "P three"], list("one two STOP three")])
async def test_a_stop_string_ends_the_answer_closes_the_engine_and_counts_its_tokens(
    stream: bool, chunks: list[str]
) -> None:
    client = ScriptedClient([scheduled(3)], *map(tokens, chunks), asyncio.Event())  # the engine would never end
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await complete(client, stop=["STOP", "unused"], stream=stream, **options)
    text = answer.text if stream else answer.json["choices"][0]["text"]
    usage = answer.frames[-1]["usage"] if stream else answer.json["usage"]
    last = answer.frames[-2] if stream else answer.json
    assert (text, last["choices"][0]["finish_reason"]) == ("one two ", "stop")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, len("one two STOP"))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert client.closed.is_set()


async def test_the_engine_is_released_before_a_slow_client_has_taken_the_stopped_text() -> None:
    gate = asyncio.Event()
    client = ScriptedClient([scheduled()], gate, tokens("a STOP"), asyncio.Event())
    body = _json_bytes(CHAT | {"stop": "STOP", "stream": True})
    exchange = Exchange(app_for(client), "POST", "/v1/chat/completions", body)
    await exchange.next()
    await exchange.next()
    exchange.may_send.clear()
    gate.set()
    await asyncio.wait_for(client.closed.wait(), TIMEOUT_S)
    exchange.may_send.set()
    assert (await exchange.next())["body"].count(b'"content":"a "') == 1
    await exchange.task


async def test_held_back_text_is_sent_when_the_answer_ends_without_the_stop() -> None:
    client = ScriptedClient(tokens("so ST"), tokens("O"), [finished()])
    assert (await chat(client, stop="STOP", stream=True)).text == "so STO"


async def test_stop_strings_do_not_end_an_answer_before_min_tokens() -> None:
    client = ScriptedClient([*tokens("a.b.c.d"), finished()])
    body = (await complete(client, stop=".", min_tokens=4)).json
    assert body["choices"][0]["text"] == "a.b"
    assert (await complete(client, stop=".", min_tokens=3)).json["choices"][0]["text"] == "a.b"
    assert (await complete(client, stop=".", min_tokens=2)).json["choices"][0]["text"] == "a"


@pytest.mark.parametrize(("min_tokens", "text"), [(2, "a "), (5, "a "), (6, "a "), (7, "a STOP b")])
async def test_a_stop_string_that_begins_before_min_tokens_ends_the_answer_behind_them(
    min_tokens: int, text: str
) -> None:
    client = ScriptedClient(*map(tokens, "a STOP b"), [finished()])
    asked: dict[str, Any] = {"stop": "STOP", "min_tokens": min_tokens}
    assert (await complete(client, **asked)).json["choices"][0]["text"] == text
    assert (await complete(client, stream=True, **asked)).text == text


async def test_tokens_that_wait_while_the_client_is_slow_are_not_taken_from_the_engine() -> None:
    client = ScriptedClient([scheduled()], *[tokens(character) for character in "abcdef"], [finished()])
    exchange = Exchange(app_for(client), "POST", "/v1/chat/completions", _json_bytes(CHAT | {"stream": True}))
    exchange.may_send.clear()
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.items_taken == 1
    exchange.may_send.set()
    assert (await exchange.finish()).text == "abcdef"


async def test_models_are_listed_and_found_by_ids_with_slashes() -> None:
    client = ScriptedClient()
    listed = (await get(client, "/v1/models")).json
    assert listed["object"] == "list"
    Model.model_validate(listed["data"][0], strict=True)
    assert (await get(client, f"/v1/models/{MODEL.id}")).json == listed["data"][0]
    missing = await get(client, "/v1/models/other/model")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_health_tells_one_start_of_a_server_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "x-instance-id" not in (await get(ScriptedClient(), "/health")).headers
    monkeypatch.setenv("CHUNKSERVE_INSTANCE", "this one")
    assert (await get(ScriptedClient(), "/health")).headers["x-instance-id"] == "this one"


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_a_probe_is_200_or_503(path: str) -> None:
    assert (await get(ScriptedClient(), path)).status == 200
    sick = ScriptedClient(health=EngineError(ErrorCode.STEP_FAILED, "/secret/path broke"))
    answer = await get(sick, path)
    assert (answer.status, answer.error["type"]) == (503, "server_error")
    assert "secret" not in answer.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing/" + "x" * 5000, 404),
        ("POST", "/v1/completions/", 404),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_unknown_routes_and_methods_have_the_same_envelope(method: str, path: str, status: int) -> None:
    answer = await get(ScriptedClient(), path, method)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert len(answer.error["message"]) < 300
    assert ("allow" in {name.lower() for name in answer.headers}) == (status == 405)


async def test_every_response_has_a_request_id_and_a_well_formed_one_is_kept() -> None:
    assert len((await get(ScriptedClient(), "/health")).headers["x-request-id"]) == 32
    json_type = ("content-type", "application/json")
    for given, kept in (("abc-1", True), ("bad id\n", False), ("x" * 200, False)):
        headers = [json_type, ("x-request-id", given)]
        answer = await Exchange(app_for(hello()), "POST", "/v1/completions", b"{", headers).finish()
        assert (answer.headers["x-request-id"] == given) is kept


async def test_ids_are_unique_in_the_engine_even_when_clients_repeat_theirs() -> None:
    client = hello()
    headers = [("content-type", "application/json"), ("x-request-id", "same")]
    for _ in range(2):
        await Exchange(app_for(client), "POST", "/v1/chat/completions", _json_bytes(CHAT), headers).finish()
    assert len({submission.request_id for submission in client.submissions}) == 2
