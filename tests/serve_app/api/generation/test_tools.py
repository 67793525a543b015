"""Owns the contract of chats that think and call tools: what the template sees, and how a response presents the answer.
Never tests a model's grammar: tests/serve_app/parsing does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.protocol import FinishReason, Token
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.harness import CHAT, MODEL, Answer, ScriptedClient, finished, post, said, scheduled, tokens

pytestmark = pytest.mark.anyio

CALLER = replace(MODEL, max_model_len=4000, tool_parser="hermes")
THINKER = replace(CALLER, reasoning_parser="qwen3")
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if documents %}D{{ documents | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}?{{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def app_of(client: ScriptedClient, model: ServedModel = CALLER, template: str = TEMPLATE) -> Any:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(template, {})
    return create_app(client, tokenizer, model)


def saying(text: str, pieces: int = 1, reason: FinishReason = FinishReason.STOP) -> ScriptedClient:
    events = tokens(text)
    size = -(-len(events) // pieces)
    parts = [events[i : i + size] for i in range(0, len(events), size)]
    return ScriptedClient([scheduled()], *parts, [finished(reason)])


async def ask(client: ScriptedClient, model: ServedModel = CALLER, **fields: Any) -> Answer:
    return await post(app_of(client, model), "/v1/chat/completions", CHAT | {"tools": TOOLS} | fields)


def prompt_of(client: ScriptedClient) -> str:
    return bytes(client.submissions[0].prompt_token_ids).decode()


async def whole_and_streamed(text: str, model: ServedModel = CALLER, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message and the finish reason, which are the same whole and streamed,
    in whatever pieces the text comes."""
    body = (await ask(saying(text), model, **fields)).json
    ChatCompletion.model_validate(body, strict=False)
    choice = body["choices"][0]
    message = said(choice["message"])
    for pieces in (1, 3, len(text)):
        streamed = await ask(saying(text, pieces), model, stream=True, **fields)
        joined, reason = together(streamed)
        names = [call.pop("id") for call in joined.get("tool_calls", ())]
        ids = [call["id"] for call in message.get("tool_calls", ())]
        assert len(names) == len(ids)
        without_ids = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
        assert joined == message | ({"tool_calls": without_ids} if without_ids else {})
        assert reason == choice["finish_reason"]
    return message, choice["finish_reason"]


def together(answer: Answer) -> tuple[dict[str, Any], str]:
    """Put a stream's deltas together to one message, as clients do."""
    message: dict[str, Any] = {"content": None}
    calls: list[dict[str, Any]] = []
    for frame in answer.frames:
        ChatCompletionChunk.model_validate(frame, strict=False)
        delta = dict(frame["choices"][0]["delta"])
        for call in delta.pop("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for key, value in delta.items():
            message[key] = value if key == "role" else (message.get(key) or "") + value
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message, answer.frames[-1]["choices"][0]["finish_reason"]


# --- what an answer says --------------------------------------------------------------------------------------------


async def test_a_call_is_a_tool_call_and_no_content() -> None:
    message, reason = await whole_and_streamed(CALL)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert (message["content"], reason) == (None, "tool_calls")


async def test_text_before_a_call_is_content_and_several_calls_are_numbered() -> None:
    message, reason = await whole_and_streamed(f"Let me look.{CALL}{CALL}")
    assert message["content"] == "Let me look."
    assert len(message["tool_calls"]) == 2
    assert reason == "tool_calls"


async def test_without_parallel_calls_only_the_first_is_shown() -> None:
    message, _ = await whole_and_streamed(f"{CALL}{CALL}", parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1


async def test_an_answer_without_a_call_is_as_if_there_were_no_tools() -> None:
    message, reason = await whole_and_streamed("It is <b>cold</b> <tool")
    assert (message["content"], reason) == ("It is <b>cold</b> <tool", "stop")
    assert "tool_calls" not in message


async def test_a_call_that_is_cut_off_ends_by_length() -> None:
    body = (await ask(saying(CALL[:60], reason=FinishReason.LENGTH))).json
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_reasoning_is_told_apart_by_both_its_names_and_calls_follow_it() -> None:
    message, reason = await whole_and_streamed(f"<think>\nHm, Oslo.\n</think>\n\n{CALL}", THINKER)
    assert message["reasoning"] == message["reasoning_content"] == "Hm, Oslo."
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")


async def test_reasoning_that_nobody_wants_is_not_shown() -> None:
    message, _ = await whole_and_streamed("<think>\nHm.\n</think>\n\nYes.", THINKER, include_reasoning=False)
    assert message == {"role": "assistant", "content": "Yes."}


async def test_a_prompt_that_closed_the_thoughts_leaves_only_content() -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "tools": None}
    message, _ = await whole_and_streamed("<think> is a tag.", THINKER, **fields)
    assert message == {"role": "assistant", "content": "<think> is a tag."}


async def test_with_tool_choice_none_the_model_is_told_of_no_tool_and_nothing_is_a_call() -> None:
    client = saying(CALL)
    body = (await ask(client, tool_choice="none")).json
    assert body["choices"][0]["message"]["content"] == CALL
    assert prompt_of(client) == "[user:hi]>"


async def test_a_call_in_special_tokens_is_seen() -> None:
    """[TOOL_CALLS] is a special token of Mistral's, and answers show no special tokens."""
    tokenizer = Tokenizer.byte_level()
    tokenizer._core.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.special_texts[262] = "[TOOL_CALLS]"
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    call = [Token("r", 262), *tokens('[{"name": "weather", "arguments": {}}]')]
    client = ScriptedClient([scheduled()], call, [finished()])
    app = create_app(client, tokenizer, replace(CALLER, tool_parser="mistral"))
    body = (await post(app, "/v1/chat/completions", CHAT | {"tools": TOOLS})).json
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_each_choice_has_a_reader_of_its_own() -> None:
    answer = await ask(saying(CALL, 4), n=2, stream=True)
    starts = [
        (choice["index"], call["index"])
        for frame in answer.frames
        for choice in frame["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert sorted(starts) == [(0, 0), (1, 0)]


async def test_a_frame_has_one_entry_for_each_call_and_the_first_of_a_call_names_it() -> None:
    """llama-index reads only the first entry of a frame:
    arguments in a second one, beside their call's start, got lost."""
    for pieces in range(1, len(CALL) + 1):
        answer = await ask(saying(CALL, pieces), stream=True)
        deltas = [frame["choices"][0]["delta"].get("tool_calls", []) for frame in answer.frames]
        assert all(len(calls) <= 1 for calls in deltas)
        named = [call for calls in deltas for call in calls if "id" in call]
        assert [call["function"]["name"] for call in named] == ["weather"]
        assert "".join(call["function"]["arguments"] for calls in deltas for call in calls) == '{"city": "Oslo"}'


async def test_a_frame_is_only_sent_where_there_is_something_to_tell() -> None:
    client = ScriptedClient([scheduled()], tokens("<tool"), tokens("_call>"), asyncio.Event())
    client.script[-1].set()  # type: ignore[union-attr]
    client.script = (*client.script, tokens(CALL[11:]), [finished()])
    answer = await ask(client, stream=True)
    assert all(choice["delta"] or choice["finish_reason"] for frame in answer.frames for choice in frame["choices"])


# --- what the template sees -----------------------------------------------------------------------------------------


async def test_the_template_sees_tools_calls_and_their_results() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]
    client = saying("x")
    assert (await ask(client, messages=messages)).status == 200
    assert prompt_of(client) == f"T{json.dumps(TOOLS)}[user:hi][assistant:?Hm.!weatherOslo][tool:cold]>"


async def test_a_schema_too_deep_for_the_templates_own_macro_is_a_400_and_not_a_500() -> None:
    template = (
        "{% macro walk(v) %}{% for k in v %}{% call inner() %}{{ walk(v[k]) }}{% endcall %}{% endfor %}{% endmacro %}"
        "{% macro inner() %}{{ caller() }}{% endmacro %}{{ walk(tools[0].function.parameters) }}"
    )
    parameters: dict[str, Any] = {}
    for _ in range(190):
        parameters = {"a": parameters}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = await post(app_of(saying("x"), template=template), "/v1/chat/completions", CHAT | {"tools": tools})
    assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_the_last_message_can_be_continued() -> None:
    client = saying("x")
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well,"}]
    await ask(client, tools=None, messages=messages, continue_final_message=True)
    assert prompt_of(client) == "[user:hi][assistant:Well,"


async def test_documents_reach_the_template() -> None:
    client = saying("x")
    await ask(client, tools=None, documents=[{"text": "d"}], add_generation_prompt=False)
    assert prompt_of(client) == 'D[{"text": "d"}][user:hi]'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": None, "documents": [{"text": "d"}]}, "documents"),
        ({"tools": None, "chat_template_kwargs": {"custom": True}}, "chat_template_kwargs.custom"),
        ({"tools": None, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
async def test_what_the_template_would_ignore_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    client = saying("x")
    app = app_of(client, CALLER, "{% for m in messages %}{{ m.content }}{% endfor %}")
    answer = await post(app, "/v1/chat/completions", CHAT | fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "unsupported_parameter")
    assert not client.submissions


async def test_a_conversation_with_tools_is_rendered_by_the_template_for_tools() -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate("plain{% for m in messages %}{{ m.content }}{% endfor %}", {})
    tokenizer._tool_template = ChatTemplate(TEMPLATE, {})
    for fields, prompt in (
        (
            {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
            f"T{json.dumps(TOOLS)}[user:hi]><think>",
        ),
        ({"tools": TOOLS, "tool_choice": "none"}, "plainhi"),
        ({}, "plainhi"),
    ):
        client = saying("x")
        answer = await post(create_app(client, tokenizer, CALLER), "/v1/chat/completions", CHAT | fields)
        assert answer.status == 200, answer
        assert prompt_of(client).startswith(prompt)


async def test_tools_for_a_model_that_calls_none_are_refused() -> None:
    answer = await ask(saying("x"), replace(CALLER, tool_parser=None))
    assert (answer.status, answer.error["param"]) == (400, "tools")


# --- answers in JSON beside tools -----------------------------------------------------------------------------------

NAMED = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"name": {}, "parameters": {}}}},
}


@pytest.mark.parametrize("parser", ["llama3_json", "phi4_mini_json", "mistral", "hermes"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "parameters": {"age": 5}}',
        '{"parameters": {"age": 5}, "name": "Ann"}',
        json.dumps({"text": CALL}),
        '{"text": "[TOOL_CALLS]weather[ARGS]{}"}',
        '{"text": "functools[{}]<|python_tag|>{}"}',
    ],
)
async def test_an_answer_in_json_is_content_whatever_it_looks_like(parser: str, text: str) -> None:
    model = replace(CALLER, tool_parser=parser)
    message, reason = await whole_and_streamed(text, model, response_format=NAMED)
    assert (message["content"], reason) == (text, "stop")
    assert "tool_calls" not in message


async def test_an_answer_in_json_beside_tools_may_still_be_a_call() -> None:
    message, reason = await whole_and_streamed(f"\n{CALL}{CALL}", response_format=NAMED)
    assert (message["content"], len(message["tool_calls"]), reason) == (None, 2, "tool_calls")


async def test_a_bare_object_that_names_no_tool_is_content_without_a_format_too() -> None:
    text = '{"name": "Ann", "parameters": {"age": 5}}'
    message, reason = await whole_and_streamed(text, replace(CALLER, tool_parser="llama3_json"))
    assert (message["content"], reason) == (text, "stop")
