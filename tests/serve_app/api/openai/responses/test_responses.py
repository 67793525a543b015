"""Owns the contract of /v1/responses: what the model reads, what the response says, whole and streamed, and refusals.
Never tests what it shares with chats: parsers, admission, deadlines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.protocol import EngineError, ErrorCode, FinishReason, Token, TokenLogprobs
from serve_app.api.openai.responses.answer_schema import ResponseAnswer, ResponseEvent
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.api.generation.test_tools import CALL, CALLER, TEMPLATE, THINKER, app_of, prompt_of, saying
from tests.serve_app.harness import Answer, ScriptedClient, failed, finished, post, scheduled, tokens

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": CALLER.id, "input": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}]
AS_TEMPLATE = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
LOOK = {"type": "output_text", "text": "Look.", "annotations": []}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def ask(client: ScriptedClient, model: ServedModel = CALLER, template: str = TEMPLATE, **fields: Any) -> Answer:
    return await post(app_of(client, model, template), "/v1/responses", ASK | fields)


async def read_by_the_model(**fields: Any) -> str:
    client = saying("x")
    answer = await ask(client, **fields)
    assert answer.status == 200, answer.json
    return prompt_of(client)


def valid(body: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate_json(json.dumps(body), strict=True)
    ResponseAnswer.model_validate(body)
    return body


def events(answer: Answer) -> list[dict[str, Any]]:
    """Return the payloads, numbered from zero, each named as its type and valid by OpenAI's types."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in b"".join(answer.parts).decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        assert payload["sequence_number"] == len(found)
        EVENT.validate_json(json.dumps(payload), strict=True)
        ResponseEvent.model_validate(payload)
        found.append(payload)
    return found


def without_bytes(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop bytes, as OpenAI's events do."""
    return [
        {"token": one["token"], "logprob": one["logprob"]}
        | {"top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]]}
        for one in logprobs
    ]


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that the events build, and check that they end with it."""
    assert [one["type"] for one in found[:2]] == ["response.created", "response.in_progress"]
    assert found[0]["response"]["output"] == []
    items: list[dict[str, Any]] = []
    for one in found[2:-1]:
        kind, index = one["type"], one["output_index"]
        if kind == "response.output_item.added":
            assert (index, one["item"]["status"]) == (len(items), "in_progress")
            items.append(one["item"])
            continue
        assert index == len(items) - 1
        item = items[-1]
        assert one.get("item_id", item["id"]) == item["id"]
        if kind == "response.content_part.added":
            item["content"].append(one["part"])
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += one["delta"]
        elif kind == "response.custom_tool_call_input.delta":
            assert one["delta"]
            item["input"] += one["delta"]
        elif kind == "response.custom_tool_call_input.done":
            assert one["input"] == item["input"]
        elif kind.endswith("_text.delta"):
            item["content"][one["content_index"]]["text"] += one["delta"]
            item["content"][one["content_index"]].setdefault("logprobs", []).extend(one.get("logprobs", ()))
        elif kind == "response.content_part.done":
            told = item["content"][one["content_index"]]
            assert one["part"]["text"] == told["text"]
            assert without_bytes(one["part"].get("logprobs", [])) == told["logprobs"]
            item["content"][one["content_index"]] = one["part"]
        elif kind == "response.function_call_arguments.done":
            assert (one["arguments"], one["name"]) == (item["arguments"], item["name"])
        elif kind == "response.output_item.done":
            sealed = {name: one["item"][name] for name in ("encrypted_content",) if name in one["item"]}
            assert one["item"] == item | {"status": one["item"]["status"]} | sealed
            items[-1] = one["item"]
        else:
            assert one["text"] == item["content"][0]["text"]
            assert one.get("logprobs", []) == item["content"][0]["logprobs"]
    response = found[-1]["response"]
    assert found[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return dict(response)


async def whole_and_streamed(
    text: str, model: ServedModel = CALLER, reason: FinishReason = FinishReason.STOP, **fields: Any
) -> dict[str, Any]:
    """Return the response, checking that it is the same whole and streamed, however the text arrives."""
    response = valid((await ask(saying(text, reason=reason), model, **fields)).json)
    for pieces in (1, 3, len(text)):
        streamed = together(events(await ask(saying(text, pieces, reason), model, stream=True, **fields)))
        assert _unnamed(streamed) == _unnamed(response)
    return response


def _unnamed(response: dict[str, Any]) -> dict[str, Any]:
    """Drop ids and times, which differ between answers."""
    items = [item | {"id": "", "call_id": ""} for item in response["output"]]
    times = {"created_at": 0, "completed_at": None if response["completed_at"] is None else 0}
    return response | times | {"id": "", "output": items}


# --- what an answer says --------------------------------------------------------------------------------------------


async def test_a_text_is_one_message_and_completes_the_response() -> None:
    response = await whole_and_streamed("Hello.")
    assert response["id"].startswith("resp_")
    assert (response["status"], response["object"], response["model"]) == ("completed", "response", CALLER.id)
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert [part["text"] for part in message["content"]] == ["Hello."]
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


async def test_the_response_repeats_what_was_asked_and_keeps_nothing() -> None:
    asked = {"instructions": "i", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.25, "metadata": {"a": "b"}}
    asked |= {"safety_identifier": "s", "prompt_cache_key": "k"}
    client = saying("x")
    response = valid((await ask(client, **asked, tools=TOOLS, user="u", store=True)).json)
    assert {name: response[name] for name in asked} == asked
    assert (response["store"], response["user"], response["tools"]) == (False, "u", [TOOLS[0] | {"strict": True}])
    sampling = client.submissions[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 9)


async def test_calls_are_items_with_arguments_as_json() -> None:
    response = await whole_and_streamed(f"Let me look.{CALL}\n{CALL}", tools=TOOLS)
    message, *calls = response["output"]
    assert message["content"][0]["text"] == "Let me look."
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("function_call", "weather", {"city": "Oslo"})
    ] * 2
    assert len({item["id"] for item in response["output"]}) == 3


async def test_text_between_and_after_calls_stays_in_its_place() -> None:
    response = await whole_and_streamed(f"{CALL}And{CALL}Bye", tools=TOOLS)
    kinds = [one["type"] for one in response["output"]]
    assert kinds == ["function_call", "message"] * 2


async def test_without_parallel_calls_only_the_first_is_shown() -> None:
    response = await whole_and_streamed(f"{CALL}{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert len(response["output"]) == 1


async def test_thoughts_are_an_item_before_the_message_and_counted() -> None:
    response = await whole_and_streamed("<think>\nHm.\n</think>\n\nYes.", THINKER)
    thoughts, message = response["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>\n\n")}


async def test_an_answer_that_was_cut_off_is_incomplete_and_so_is_its_last_item() -> None:
    response = await whole_and_streamed("<think>\nHm.\n</think>\n\nYe", THINKER, FinishReason.LENGTH)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["completed_at"] is None
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


async def test_an_answer_of_nothing_has_no_items() -> None:
    client = ScriptedClient([scheduled()], [finished()])
    assert valid((await ask(client)).json)["output"] == []
    assert together(events(await ask(client, stream=True)))["output"] == []


async def test_a_failure_in_a_stream_is_an_error_and_a_failed_response() -> None:
    error = EngineError(ErrorCode.STEP_FAILED, "secret")
    found = events(await ask(ScriptedClient([scheduled()], tokens("a"), [failed(error)]), stream=True))
    assert [one["type"] for one in found[-2:]] == ["error", "response.failed"]
    assert (found[-2]["code"], found[-1]["response"]["status"]) == ("step_failed", "failed")
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(found[-2:])


# --- what the model reads -------------------------------------------------------------------------------------------


async def test_the_model_reads_instructions_items_and_tools() -> None:
    given = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [LOOK]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "d", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "cold"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "warm"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    assert await read_by_the_model(input=given, instructions="i", tools=TOOLS) == (
        f"T{json.dumps(AS_TEMPLATE)}[system:i][user:hi][assistant:Look.?Hm.!weatherOslo!weatherRome]"
        "[tool:cold][tool:warm][developer:a\nb]>"
    )


async def test_turns_of_the_assistant_are_kept_apart_and_thoughts_may_stand_alone() -> None:
    given = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "user", "content": "c"},
    ]
    assert await read_by_the_model(input=given) == "[assistant:a][assistant:b][assistant:?Hm.][user:c]>"


async def test_what_was_answered_can_be_sent_back_as_it_is() -> None:
    answer = await ask(saying(f"<think>\nHm.\n</think>\n\nLook.{CALL}"), THINKER, tools=TOOLS)
    read = Response.model_validate(answer.json).output
    for items in (answer.json["output"], [item.model_dump(mode="json", by_alias=True) for item in read]):
        back = saying("x")
        assert (await ask(back, THINKER, input=[{"role": "user", "content": "hi"}, *items])).status == 200
        assert prompt_of(back) == "[user:hi][assistant:Look.?Hm.!weatherOslo]>"


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_retention": "24h"},
        {"store": False},
        {"store": True},
        {"tools": TOOLS, "tool_choice": "none"},
        {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "truncation": "disabled"},
        {"include": [], "background": False, "previous_response_id": None, "top_logprobs": 0},
    ],
    ids=str,
)
async def test_what_changes_no_answer_is_taken(fields: dict[str, Any]) -> None:
    assert await read_by_the_model(**fields) == "[user:hi]>"


def scored(text: str, pieces: int) -> ScriptedClient:
    """Give each token its own log-probability."""
    client = saying(text, pieces)
    for item in client.script:
        assert isinstance(item, list)
        item[:] = [
            event._replace(logprobs=TokenLogprobs(event.token_id, -event.token_id / 8, ((97, -0.5),)))
            if isinstance(event, Token)
            else event
            for event in item
        ]
    return client


@pytest.mark.parametrize("pieces", [1, 3, 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_each_token_of_a_text_has_its_log_probability_and_tokens_of_thoughts_and_calls_are_in_no_text(
    pieces: int, stream: bool
) -> None:
    text = f"<think>\nHm.\n</think>\n\nLé<ok>.{CALL}"
    answer = await ask(scored(text, pieces), THINKER, tools=TOOLS, top_logprobs=1, stream=stream)
    response = together(events(answer)) if stream else valid(answer.json)
    thought, message, call = response["output"]
    (part,) = message["content"]
    assert (thought["type"], call["type"], part["text"], response["top_logprobs"]) == (
        *("reasoning", "function_call", "Lé<ok>."),
        1,
    )
    assert [one["bytes"] for one in part["logprobs"]] == [[byte] for byte in "Lé<ok>.".encode()]
    assert [one["logprob"] for one in part["logprobs"]] == [-byte / 8 for byte in "Lé<ok>.".encode()]
    assert all(one["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}] for one in part["logprobs"])


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"top_logprobs": 5}, 5),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
        ({"top_logprobs": 0}, None),
        ({"include": []}, None),
    ],
    ids=str,
)
async def test_the_engine_is_asked_for_log_probabilities_where_they_are_told(
    fields: dict[str, Any], num: int | None
) -> None:
    client = scored("ok<", 1)
    body = valid((await ask(client, **fields)).json)
    assert client.submissions[0].sampling.logprobs == num
    told = body["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in told] == ([] if num is None else ["o", "k", "<"])


async def test_an_incomplete_character_at_the_end_of_a_text_has_its_tokens() -> None:
    client = ScriptedClient([scheduled()], scored("a🦜", 1).script[1][:-1], [finished()])  # type: ignore[index,list-item]
    body = valid((await ask(client, top_logprobs=1)).json)
    (part,) = body["output"][0]["content"]
    assert part["text"] == "a\ufffd"
    assert [one["bytes"] for one in part["logprobs"]] == [[byte] for byte in "a🦜".encode()[:-1]]


async def test_a_samplers_numbers_count_and_penalties_are_repeated() -> None:
    """Regression: the AI SDK sends penalties to a server of Open Responses, and they were unknown."""
    client = saying("x")
    told = valid((await ask(client, top_k=3, presence_penalty=0.5, frequency_penalty=-1)).json)
    assert (told["presence_penalty"], told["frequency_penalty"]) == (0.5, -1)
    sampling = client.submissions[0].sampling
    assert (sampling.top_k, sampling.presence_penalty, sampling.frequency_penalty) == (3, 0.5, -1)


async def test_requests_of_one_cache_key_go_to_one_engine() -> None:
    client = saying("x")
    await ask(client, prompt_cache_key="k")
    plain = saying("x")
    await ask(plain)
    assert client.sessions != plain.sessions == [None]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input.0.content.0.image_url",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": {}}]},
            "input.0.arguments",
        ),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["colours"]}, "include.0"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"colour": "red"}}, "reasoning.colour"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"tools": [{"type": "telephone"}]}, "tools.0.type"),
        ({"tools": [{"name": "a"}]}, "tools.0"),
        ({"input": [{"type": "telephone_call"}]}, "input.0.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_k": -2}, "top_k"),
        ({"tools": [TOOLS[0] | {"strict": True, "parameters": {"not": {}}}]}, "tools.0.parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**4000}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    client = saying("x")
    answer = await ask(client, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.json
    assert not client.submissions


async def test_another_model_is_a_404() -> None:
    answer = await post(app_of(saying("x")), "/v1/responses", ASK | {"model": "other"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
