"""Owns the contract of fields that clients of vLLM and SGLang read, and of what they send besides OpenAI's API.
Never depends on a real engine: every event is scripted, except where a grammar must be followed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from engine.protocol import Event, Finished, FinishReason, PromptLogprobs, Token, TokenLogprobs, Usage
from tests.serve_app.api.test_end_to_end import openai_client
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Exchange,
    ScriptedClient,
    app_for,
    complete,
    finished,
    get,
    post,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

GENERATE = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]
USAGE = Usage(2, 3, 0)


def ends(event: Event, text: str = "ab") -> ScriptedClient:
    return ScriptedClient([scheduled()], tokens(text), [event])


def stopped_by(token_id: int) -> Finished:
    return Finished("r", FinishReason.STOP, USAGE, token_id)


async def stop_of(client: ScriptedClient, path: str, body: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return `finish_reason` with vLLM's and SGLang's word for it,
    which are the same in a whole answer and in a stream's last chunk."""
    choice = (await post(app_for(client), path, body)).json["choices"][0]
    *before, last = (await post(app_for(client), path, body | {"stream": True})).frames
    assert all(frame["choices"][0].get("matched_stop") is None for frame in before)
    assert all(frame["choices"][0].get("stop_reason") is None for frame in before)
    names = ("finish_reason", "stop_reason", "matched_stop")
    assert [choice[name] for name in names] == [last["choices"][0][name] for name in names]
    return tuple(choice[name] for name in names)  # type: ignore[return-value]


# --- what ended an answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), GENERATE)
async def test_a_stop_string_is_reported_in_both_fields(path: str, body: dict[str, Any]) -> None:
    client = ScriptedClient([scheduled()], tokens("one two"), [finished()])
    assert await stop_of(client, path, body | {"stop": ["zz", "tw"]}) == ("stop", "tw", "tw")


@pytest.mark.parametrize(("path", "body"), GENERATE)
async def test_a_stop_token_is_reported_by_its_id(path: str, body: dict[str, Any]) -> None:
    assert await stop_of(ends(stopped_by(97)), path, body | {"stop_token_ids": [97]}) == ("stop", 97, 97)


@pytest.mark.parametrize(("path", "body"), GENERATE)
async def test_the_end_of_sequence_is_no_stop_reason_at_vllm_and_a_matched_stop_at_sglang(
    path: str, body: dict[str, Any]
) -> None:
    assert await stop_of(ends(stopped_by(256)), path, body) == ("stop", None, 256)


@pytest.mark.parametrize(("path", "body"), GENERATE)
async def test_an_end_of_sequence_that_the_client_named_is_reported(path: str, body: dict[str, Any]) -> None:
    named = body | {"stop_token_ids": [256], "ignore_eos": True}
    assert await stop_of(ends(stopped_by(256)), path, named) == ("stop", 256, 256)


@pytest.mark.parametrize(("path", "body"), GENERATE)
async def test_an_answer_that_is_as_long_as_allowed_was_stopped_by_nothing(path: str, body: dict[str, Any]) -> None:
    assert await stop_of(ends(finished(FinishReason.LENGTH)), path, body) == ("length", None, None)


async def test_a_stop_string_in_the_last_text_wins_over_the_stop_token_after_it() -> None:
    client = ScriptedClient([scheduled()], [*tokens("a STOP"), stopped_by(256)])
    assert await stop_of(client, "/v1/completions", PROMPT | {"stop": "STOP"}) == ("stop", "STOP", "STOP")


async def test_a_message_names_a_stop_sequence_and_no_token() -> None:
    body: dict[str, Any] = {"model": MODEL.id, "max_tokens": 9, "messages": CHAT["messages"], "stop_sequences": ["b"]}
    told = (await post(app_for(ends(finished())), "/v1/messages", body)).json
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "b")
    told = (await post(app_for(ends(stopped_by(256), "a")), "/v1/messages", body)).json
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)


async def test_many_stop_strings_are_looked_for_and_the_first_that_is_complete_ends_the_answer() -> None:
    stops = [f"<{number}>" for number in range(63)]
    client = ScriptedClient([scheduled()], *map(tokens, "text <6<62> more"), [finished()])
    choice = (await complete(client, stop=["never", *stops])).json["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("text <6", "<62>")


# --- what clients read by attribute ---------------------------------------------------------------------------------


async def test_vllms_clients_read_null_where_nothing_was_asked_for() -> None:
    """An absent field is an AttributeError in OpenAI's client."""
    async with openai_client(app_for(ends(finished()))) as client:
        told: Any = await client.chat.completions.create(**CHAT)
        text: Any = (await client.completions.create(**PROMPT)).choices[0]
        chunks: list[Any] = [chunk async for chunk in await client.completions.create(**PROMPT, stream=True)]
    choice = told.choices[0]
    assert (told.prompt_logprobs, told.prompt_token_ids, choice.token_ids, choice.stop_reason) == (None,) * 4
    assert (choice.message.reasoning, choice.message.reasoning_content, choice.message.annotations) == (None, None, [])
    assert (text.prompt_logprobs, text.prompt_token_ids, text.token_ids, text.stop_reason) == (None,) * 4
    for part in [chunk.choices[0] for chunk in chunks]:
        assert (part.token_ids, part.prompt_token_ids, part.stop_reason) == (None,) * 3


async def test_each_chunk_of_a_completion_has_lists_of_the_tokens_that_were_asked_for() -> None:
    """vLLM's own suite adds the lists up without checking that they are there."""
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    async with openai_client(app_for(ends(Finished("r", FinishReason.LENGTH, USAGE)))) as client:
        stream = await client.completions.create(**PROMPT, stream=True, logprobs=0, extra_body=extra)
        parts: list[Any] = [chunk.choices[0] async for chunk in stream]
    assert [part.prompt_token_ids for part in parts] == [[104, 105], *[None] * (len(parts) - 1)]
    assert [token_id for part in parts for token_id in part.token_ids] == [97, 98]
    assert [name for part in parts for name in part.logprobs.tokens] == ["token_id:97", "token_id:98"]


async def test_only_the_first_chunk_of_a_chat_has_the_prompts_token_ids() -> None:
    first, *others = (await post(app_for(ends(finished())), *_streamed_chat(return_token_ids=True))).frames
    assert first["prompt_token_ids"]
    assert all("prompt_token_ids" not in frame for frame in others)
    assert all(choice.get("token_ids", ()) is not None for frame in others for choice in frame["choices"])


def _streamed_chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", CHAT | {"stream": True} | fields


# --- log-probabilities ----------------------------------------------------------------------------------------------


def scored_prompt(top: Sequence[tuple[int, float]], rank: int | None) -> ScriptedClient:
    scores = PromptLogprobs("r", (TokenLogprobs(105, -7.5, tuple(top), rank),))
    return ScriptedClient([scheduled()], [scores], tokens("a"), [finished()])


@pytest.mark.parametrize("rank", [4711, None])
async def test_a_prompts_token_has_its_rank_outside_the_alternatives_if_the_engine_tells_it(rank: int | None) -> None:
    choice = (await complete(scored_prompt([(97, -0.5)], rank), prompt_logprobs=1)).json["choices"][0]
    (first, second) = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "105": {"logprob": -7.5, "rank": rank, "decoded_token": "i"},
    }


async def test_a_prompts_token_has_its_rank_without_alternatives() -> None:
    choice = (await complete(scored_prompt([], 3), prompt_logprobs=0)).json["choices"][0]
    assert choice["prompt_logprobs"][1] == {"105": {"logprob": -7.5, "rank": 3, "decoded_token": "i"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_named_by_their_ids_where_that_is_asked_for(stream: bool) -> None:
    event = Token("r", 97, TokenLogprobs(97, -0.5, ((98, -0.25), (97, -0.5))))
    client = ScriptedClient([scheduled()], [event], [finished(FinishReason.LENGTH)])
    extra: dict[str, Any] = {"return_tokens_as_token_ids": True, "stream": stream}
    answer = await complete(client, logprobs=2, **extra)
    logprobs = (answer.frames[0] if stream else answer.json)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert logprobs["top_logprobs"] == [{"token_id:98": -0.25, "token_id:97": -0.5}]
    assert logprobs["text_offset"] == [0]
    answer = await post(app_for(client), "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2} | extra)
    (entry,) = (answer.frames[1] if stream else answer.json)["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])
    assert [one["token"] for one in entry["top_logprobs"]] == ["token_id:98", "token_id:97"]


# --- routes and fields ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", PROMPT),
        ("/responses", {"model": MODEL.id, "input": "hi"}),
        ("/messages", {"model": MODEL.id, "max_tokens": 3, "messages": CHAT["messages"]}),
        ("/messages/count_tokens", {"model": MODEL.id, "messages": CHAT["messages"]}),
    ],
)
async def test_a_route_is_there_without_its_version_too(path: str, body: dict[str, Any]) -> None:
    with_version, without = [await post(app_for(ends(finished())), prefix + path, body) for prefix in ("/v1", "")]
    assert (with_version.status, without.status) == (200, 200)
    assert with_version.json.keys() == without.json.keys()
    assert (await get(ScriptedClient(), path)).status == 405


@pytest.mark.parametrize("path", ["/models", f"/models/{MODEL.id}"])
async def test_models_are_there_without_their_version_too(path: str) -> None:
    assert (await get(ScriptedClient(), path)).json == (await get(ScriptedClient(), f"/v1{path}")).json


async def test_anthropics_envelope_is_that_of_the_route_without_a_version_too() -> None:
    answer = await post(app_for(ScriptedClient()), "/messages", {})
    assert (answer.status, answer.anthropic_error["type"]) == (400, "invalid_request_error")
    headers = [("content-type", "application/json"), ("x-request-id", "abc")]
    answer = await Exchange(app_for(ScriptedClient()), "POST", "/messages", b"{}", headers).finish()
    assert answer.headers["request-id"] == "abc"


async def test_best_of_one_is_what_a_chat_does() -> None:
    assert (await post(app_for(ends(finished())), "/v1/chat/completions", CHAT | {"best_of": 1})).status == 200
    answer = await post(app_for(ends(finished())), "/v1/chat/completions", CHAT | {"best_of": 2})
    assert (answer.status, answer.error["param"]) == (400, "best_of")


async def test_an_assistants_message_is_taken_back_as_it_was_given() -> None:
    message = (await post(app_for(ends(finished())), "/v1/chat/completions", CHAT)).json["choices"][0]["message"]
    again = CHAT | {"messages": [*CHAT["messages"], message, *CHAT["messages"]]}
    answer = await post(app_for(ends(finished())), "/v1/chat/completions", json.loads(json.dumps(again)))
    assert answer.status == 200
