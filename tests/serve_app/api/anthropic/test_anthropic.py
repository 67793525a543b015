"""Owns the contract of Anthropic's routes. Long: what is read, what is answered whole and streamed, and each refusal.
Never tests what it shares with chats: parsers, admission, deadlines."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import EngineError, ErrorCode, FinishReason
from serve_app.admission.gate import Gate
from serve_app.api.anthropic.answer_schema import Event, MessageAnswer
from serve_app.api.anthropic.message import SIGNATURE
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.engines.engine_client import ServedModel
from serve_app.settings.auth import ApiKey
from tests.serve_app.api.generation.test_tools import CALL, CALLER, TEMPLATE, THINKER, app_of, prompt_of, saying
from tests.serve_app.harness import (
    CHAT,
    Answer,
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

ASK: dict[str, Any] = {"model": CALLER.id, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
HINT = {"type": "ephemeral"}
AS_TEMPLATE = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]


async def ask(client: ScriptedClient, model: ServedModel = CALLER, **fields: Any) -> Answer:
    return await post(app_of(client, model), "/v1/messages", ASK | fields)


async def count(**fields: Any) -> Answer:
    body = {key: value for key, value in ASK.items() if key != "max_tokens"} | fields
    return await post(app_of(ScriptedClient()), "/v1/messages/count_tokens", body)


async def read_by_the_model(**fields: Any) -> str:
    client = saying("x")
    answer = await ask(client, **fields)
    assert answer.status == 200, answer.json
    return prompt_of(client)


def events(answer: Answer) -> list[dict[str, Any]]:
    """Return the payloads; each event is named as its type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in b"".join(answer.parts).decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        Event.model_validate(payload)
        found.append(payload)
    return found


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream's events together to one message, as clients do; an index out of order fails."""
    assert [one["type"] for one in found[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    message, inputs, is_open = found[0]["message"], "", False
    for one in found[2:-2]:
        starts = one["type"] == "content_block_start"
        assert starts is not is_open or one["type"] != "content_block_start"
        assert one["index"] == len(message["content"]) - (not starts)
        if starts:
            message["content"].append(dict(one["content_block"]))
            inputs, is_open = "", True
            continue
        assert is_open
        block = message["content"][-1]
        if one["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(inputs)
        elif one["delta"]["type"] == "input_json_delta":
            inputs += one["delta"]["partial_json"]
        else:
            key = one["delta"]["type"].removesuffix("_delta")
            block[key] += one["delta"][key]
    assert not is_open
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}


async def whole_and_streamed(text: str, model: ServedModel = CALLER, **fields: Any) -> dict[str, Any]:
    """Return the message, which is the same whole and streamed, in whatever pieces the text comes."""
    message = (await ask(saying(text), model, **fields)).json
    MessageAnswer.model_validate(message)
    for pieces in (1, 3, len(text)):
        streamed = together(events(await ask(saying(text, pieces), model, stream=True, **fields)))
        assert _unnamed(streamed) == _unnamed(message)
    return dict(message)


def _unnamed(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out ids, which are drawn for each answer."""
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return message | {"id": "", "content": blocks}


# --- what an answer says --------------------------------------------------------------------------------------------


async def test_a_text_is_one_block_and_ends_the_turn() -> None:
    message = await whole_and_streamed("Hello.")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": CALLER.id,
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "context_management": None,
        "diagnostics": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_creation": None,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
            "output_tokens_details": None,
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
            "speed": "standard",
            "iterations": None,
            "fallback_credit": None,
        },
    }


async def test_cached_tokens_are_no_input_tokens() -> None:
    client = ScriptedClient([scheduled(4)], tokens("a"), [finished(cached=4)])
    usage = (await ask(client)).json["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 4)
    found = events(await ask(client, stream=True))
    assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    assert found[-2]["usage"] == usage


async def test_max_tokens_that_are_reached_are_the_stop_reason() -> None:
    message = (await ask(saying("a", reason=FinishReason.LENGTH))).json
    assert message["stop_reason"] == "max_tokens"


async def test_the_stop_sequence_that_ended_the_answer_is_named_and_not_shown() -> None:
    message = await whole_and_streamed("one two three", stop_sequences=["zzz", " two"])
    assert message["content"] == [{"type": "text", "text": "one"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " two")


@pytest.mark.parametrize(("over", "reason"), [(0, "max_tokens"), (1, "model_context_window_exceeded")])
async def test_the_context_is_the_stop_reason_where_it_holds_less_than_max_tokens(over: int, reason: str) -> None:
    client = saying("a", reason=FinishReason.LENGTH)
    await ask(client)
    left = CALLER.max_model_len - len(client.submissions[0].prompt_token_ids)
    message = (await ask(saying("a", reason=FinishReason.LENGTH), max_tokens=left + over)).json
    MessageAnswer.model_validate(message)
    streamed = await ask(saying("a", reason=FinishReason.LENGTH), max_tokens=left + over, stream=True)
    assert message["stop_reason"] == together(events(streamed))["stop_reason"] == reason
    assert (await ask(saying("a"), max_tokens=left + over)).json["stop_reason"] == "end_turn"


async def test_a_stop_sequence_after_a_call_leaves_the_call_as_the_stop_reason() -> None:
    """A loop of tools ends if the reason is not `tool_use`, and the call is never run."""
    message = await whole_and_streamed(f"{CALL}\nObservation: sunny", tools=TOOLS, stop_sequences=["Observation:"])
    assert message["content"][0]["type"] == "tool_use"
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_a_call_is_a_tool_use_block_with_its_input_as_an_object() -> None:
    message = await whole_and_streamed(f"Let me look.{CALL}\n{CALL}", tools=TOOLS)
    text, *calls = message["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", {"city": "Oslo"})
    ] * 2
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("num_hosted", [0, 1, 3])
async def test_an_error_names_the_tool_where_the_request_has_it(num_hosted: int) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    bad = {"name": "b", "strict": True, "input_schema": {"type": "object", "properties": {"a": {"type": "telephone"}}}}
    refused = await ask(ScriptedClient(), tools=[*[hosted] * num_hosted, *TOOLS, bad])
    place = f"tools.{num_hosted + 1}.input_schema"
    assert (refused.status, place in refused.anthropic_error["message"]) == (400, True), refused.json
    twice = await ask(ScriptedClient(), tools=[*[hosted] * num_hosted, *TOOLS, *TOOLS], tool_choice={"type": "any"})
    assert twice.anthropic_error["message"].startswith(f"tools.{num_hosted + 1}.name: ")


async def test_a_call_that_was_cut_off_is_shown_as_far_as_it_goes() -> None:
    message = (await ask(saying(CALL[:57], reason=FinishReason.LENGTH), tools=TOOLS)).json
    assert message["stop_reason"] == "max_tokens"
    (block,) = message["content"]
    assert (block["name"], block["input"]) == ("weather", {})


async def test_numbers_without_end_leave_an_answer_that_is_json_whole_and_streamed() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "a": [1e999, -1e999, 1.5]}}\n</tool_call>'
    message = (await ask(saying(call), tools=TOOLS)).json
    assert message["content"][0]["input"] == {"city": "Oslo", "a": [None, None, 1.5]}
    streamed = together(events(await ask(saying(call, 3), tools=TOOLS, stream=True)))
    assert streamed["content"][0]["input"] == {"city": "Oslo", "a": [math.inf, -math.inf, 1.5]}  # as 1e999 is read
    assert streamed["stop_reason"] == message["stop_reason"] == "tool_use"


async def test_text_between_and_after_calls_stays_in_its_place() -> None:
    message = await whole_and_streamed(f"{CALL}And{CALL}Bye", tools=TOOLS)
    kinds = [one["type"] for one in message["content"]]
    assert kinds == ["tool_use", "text"] * 2


async def test_without_parallel_use_only_the_first_call_is_shown() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await whole_and_streamed(f"{CALL}{CALL}", tools=TOOLS, tool_choice=choice)
    assert len(message["content"]) == 1


async def test_thoughts_are_a_block_before_the_text() -> None:
    message = await whole_and_streamed("<think>\nHm.\n</think>\n\nYes.", THINKER, thinking={"type": "adaptive"})
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
        {"type": "text", "text": "Yes."},
    ]


async def test_thoughts_are_signed_last_since_clients_bring_back_only_those_that_are() -> None:
    streamed = await ask(saying("<think>\nHm.\n</think>\n\nYes.", 3), THINKER, stream=True)
    told = [one for one in events(streamed) if one.get("index") == 0]
    assert told[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert told[-2]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert told[-1]["type"] == "content_block_stop"
    assert SIGNATURE


async def test_with_thinking_disabled_the_template_is_told_and_no_thoughts_are_shown() -> None:
    client = saying("<think>\nHm.\n</think>\n\nYes.")
    plain = TEMPLATE.replace("enable_thinking", "another")
    app = app_of(client, THINKER, plain)
    message = (await post(app, "/v1/messages", ASK | {"thinking": {"type": "disabled"}})).json
    assert message["content"] == [{"type": "text", "text": "Yes."}]
    told = saying("Yes.")
    await ask(told, THINKER, thinking={"type": "disabled"})
    assert prompt_of(told).endswith("<think>\n\n</think>\n\n")


async def test_an_answer_of_nothing_has_no_blocks_and_one_of_space_has_its_space() -> None:
    client = ScriptedClient([scheduled()], [finished()])
    assert (await ask(client)).json["content"] == []
    assert together(events(await ask(client, stream=True)))["content"] == []
    assert (await whole_and_streamed(" \n"))["content"] == [{"type": "text", "text": " \n"}]


# --- what the model reads -------------------------------------------------------------------------------------------


async def test_the_model_reads_system_blocks_tools_calls_and_results() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "cold"}]},
                {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = await read_by_the_model(messages=messages, system=system, tools=TOOLS)
    assert read == (
        f"T{json.dumps(AS_TEMPLATE)}[system:a\nb][user:hi][assistant:Look.?Hm.!weatherOslo]"
        "[tool:cold][tool:Error: no][user:And?]>"
    )


async def test_a_turn_of_the_systems_is_read_where_it_stands() -> None:
    blocks = [{"type": "text", "text": "b", "cache_control": HINT}, {"type": "text", "text": "c"}]
    turns = [{"role": "system", "content": "a"}, *ASK["messages"], {"role": "system", "content": blocks}]
    assert await read_by_the_model(messages=turns, system="s") == "[system:s][system:a][user:hi][system:b\nc]>"
    assert (await count(messages=turns)).status == 200


async def test_a_trailing_assistant_message_is_continued() -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "Well,"}]
    assert await read_by_the_model(messages=messages) == "[user:hi][assistant:Well,"


async def test_with_tool_choice_none_the_model_is_told_of_no_tool() -> None:
    assert await read_by_the_model(tools=TOOLS, tool_choice={"type": "none"}) == "[user:hi]>"


async def test_how_tokens_are_chosen_reaches_the_engine() -> None:
    client = saying("x")
    await ask(client, temperature=0.5, top_p=0.25, top_k=3, max_tokens=9)
    sampling = client.submissions[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 3, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}},
        {"service_tier": "auto"},
        {"service_tier": "standard_only"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {
            "tools": [TOOLS[0] | {"type": "custom", "cache_control": HINT}],
            "tool_choice": {"type": "none"},
        },
        {"thinking": {"type": "disabled"}},
        {"container": None, "mcp_servers": [], "context_management": None},
    ],
    ids=str,
)
async def test_what_changes_no_answer_is_taken(fields: dict[str, Any]) -> None:
    assert (await read_by_the_model(**fields)).startswith("[user:hi]>")


# --- counting -------------------------------------------------------------------------------------------------------


async def test_counted_is_the_prompt_that_a_message_would_have() -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "system": "s"}
    assert (await count(**fields)).json == {"input_tokens": len(await read_by_the_model(**fields))}


async def test_counting_takes_no_field_of_generation() -> None:
    answer = await count(max_tokens=5)
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert "max_tokens" in answer.json["error"]["message"]


async def test_counting_for_another_model_is_a_404() -> None:
    assert (await count(model="other")).json["error"]["type"] == "not_found_error"


# --- refusals -------------------------------------------------------------------------------------------------------


USE = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages: No message has any content"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages: the last message calls a tool"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stop_sequences": ["a" * 900] * 5}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "one"}}, "tool_choice.type"),
        ({"tools": [TOOLS[0] | {"strict": True, "input_schema": {"not": {}}}]}, "tools.0.input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format.schema"),
        ({"output_format": {"type": "json"}}, "output_format.type"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"messages": [ASK["messages"][0] | {"output_config": {"effort": "low"}}]}, "messages.0.output_config: only"),
        ({"tools": [{"type": "retrieval_20250101", "name": "a"}]}, "tools.0.type: the type retrieval_20250101 is not"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens: should be less than max_"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024.5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: only allowed, and needed"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens: only allowed, and needed"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: the type between_tools is not"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"container": "c"}, "container"),
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"metadata": "me"}, "metadata"),
        ({"n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    client = saying("x")
    answer = await ask(client, **fields)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
    assert named in answer.json["error"]["message"]
    assert not client.submissions


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_in_the_words_by_which_the_sdk_goes_on_without_one(thread: dict[str, str]) -> None:
    answer = await ask(saying("x"), thread=thread)
    assert answer.status == 400
    assert answer.json["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (await ask(saying("x"), thread=None)).status == 200


async def test_a_refusal_has_anthropics_envelope_and_the_requests_id() -> None:
    headers = [("content-type", "application/json"), ("x-request-id", "mine"), ("anthropic-version", "2023-06-01")]
    body = json.dumps(ASK | {"model": "other"}).encode()
    answer = await Exchange(app_of(saying("x")), "POST", "/v1/messages", body, headers).finish()
    message = answer.json["error"]["message"]
    error = {"type": "not_found_error", "message": message}
    assert (answer.status, answer.json) == (404, {"type": "error", "error": error, "request_id": "mine"})


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.QUEUE_FULL, 503, "overloaded_error"),
        (ErrorCode.STEP_FAILED, 500, "api_error"),
        (ErrorCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    ],
)
async def test_each_failure_has_anthropics_type(code: ErrorCode, status: int, kind: str) -> None:
    answer = await ask(ScriptedClient(EngineError(code, "x")))
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)


async def test_without_a_key_it_is_an_authentication_error_and_x_api_key_is_one() -> None:
    keys = Keys([ApiKey(tenant="ann", sha256=hashlib.sha256(b"x").hexdigest())])
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    app, body = create_app(saying("a"), tokenizer, CALLER, keys=keys), json.dumps(ASK).encode()
    json_type = ("content-type", "application/json")
    refused = await Exchange(app, "POST", "/v1/messages", body, [json_type]).finish()
    assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
    assert (await Exchange(app, "POST", "/v1/messages", body, [json_type, ("x-api-key", "x")]).finish()).status == 200


BEFORE_THE_ROUTE = [
    ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
    ("DELETE", "/v1/messages/count_tokens", {}, 405, "invalid_request_error"),
    ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
    ("POST", "/v1/messages/", {}, 404, "not_found_error"),
    ("POST", "/v1/messages", {"content-type": "text/plain"}, 415, "invalid_request_error"),
    ("POST", "/v1/messages", {"content-length": "99999999"}, 413, "request_too_large"),
    ("POST", "/v1/messages/count_tokens", {"content-length": "99999999"}, 413, "request_too_large"),
    ("POST", "/v1/messages", {"x-api-key": "wrong"}, 401, "authentication_error"),
    ("POST", "/v1/messages/count_tokens", {"x-api-key": "wrong"}, 401, "authentication_error"),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "kind"), BEFORE_THE_ROUTE, ids=str)
async def test_what_is_refused_before_a_route_has_anthropics_shape_and_header(
    method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    keys = Keys([ApiKey(tenant="ann", sha256=hashlib.sha256(b"x").hexdigest())])
    sent = {"content-type": "application/json", "x-api-key": "x", "x-request-id": "mine"} | headers
    app = app_for(saying("a"), keys=keys)
    answer = await Exchange(app, method, path, json.dumps(ASK).encode(), list(sent.items())).finish()
    assert (answer.status, answer.anthropic_error["type"]) == (status, kind)
    assert answer.headers["request-id"] == answer.json["request_id"] == "mine"


async def test_a_full_or_draining_gate_has_anthropics_shape_and_header() -> None:
    gate = Gate()
    gate.close()
    answer = await post(app_for(saying("a"), gate=gate), "/v1/messages", ASK)
    assert (answer.status, answer.anthropic_error["type"]) == (503, "overloaded_error")
    assert answer.headers["request-id"] == answer.json["request_id"] == answer.headers["x-request-id"]
    assert float(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_header_too_also_where_serve_names_responses(stream: bool) -> None:
    answer = await post(app_for(saying("a"), names_responses=False), "/v1/messages", ASK | {"stream": stream})
    assert (answer.status, "x-request-id" in answer.headers) == (200, False)
    assert answer.headers["request-id"]


async def test_openais_routes_have_no_header_of_anthropics() -> None:
    answer = await post(app_for(saying("a")), "/v1/chat/completions", CHAT)
    assert "request-id" not in answer.headers


async def test_a_failure_in_a_stream_is_an_error_event_and_the_last() -> None:
    error = EngineError(ErrorCode.STEP_FAILED, "secret")
    found = events(await ask(ScriptedClient([scheduled()], tokens("a"), [failed(error)]), stream=True))
    assert [one["type"] for one in found[-2:]] == ["content_block_delta", "error"]
    assert found[-1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(found[-1])


async def test_a_tool_for_a_model_that_calls_none_is_refused() -> None:
    answer = await ask(saying("x"), replace(CALLER, tool_parser=None), tools=TOOLS)
    assert answer.status == 400
    assert "tools" in answer.json["error"]["message"]
