"""Owns the contract that every body and chunk is what OpenAI's published types say, plus what is documented.
Never checks values: only that there is no field, type or null that a strict client would stumble over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from serve_app.api.ingress import create_app
from serve_app.api.openai.answer_schema import ModelList
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.harness import CHAT, MODEL, PROMPT, Answer, Exchange, LocalClient, post
from tests.support.strict_openai import strict

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
REPLY = f"<think>\nHm, 🦜.\n</think>\n\nLet me look.{CALL}{CALL}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TEMPLATE = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}>"
USAGES: list[dict[str, Any]] = [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]

CHATS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"tools": TOOLS},
    {"tools": TOOLS, "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 1},
    {"include_reasoning": False, "max_tokens": 9},
    {"return_token_ids": True},
    {"stop": "Oslo", "seed": 3},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "prompt": ["a", "b"]},
    {"logprobs": 0},
    {"logprobs": 2, "echo": True},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
    {"return_token_ids": True, "prompt": [65, 66]},
    {"stop": "think"},
]


@pytest.fixture
def app() -> Iterator[ASGIApp]:
    engine = build_engine("", EngineConfig(executor="fake", fake=FakeConfig(reply=REPLY), max_model_len=512))
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    model = replace(MODEL, max_model_len=512, tool_parser="hermes", reasoning_parser="qwen3")
    yield create_app(LocalClient(engine), tokenizer, model)
    engine.shutdown()


def frames_of(answer: Answer) -> list[Any]:
    """Split into frames. With several answers, a message may have frames of more than one."""
    *payloads, last, rest = b"".join(answer.parts).decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert payloads
    return [json.loads(payload.removeprefix("data: ")) for payload in payloads]


@pytest.mark.parametrize("fields", [*CHATS, {"prompt_logprobs": 1}], ids=str)
async def test_a_whole_chat_is_openais_type_and_what_is_documented(app: ASGIApp, fields: dict[str, Any]) -> None:
    answer = await post(app, "/v1/chat/completions", CHAT | fields)
    assert answer.status == 200, answer.json
    strict(ChatCompletion).model_validate_json(b"".join(answer.parts))


@pytest.mark.parametrize(("fields", "usage"), list(product(CHATS, USAGES)), ids=str)
async def test_each_chunk_of_a_chat_is_openais_type(app: ASGIApp, fields: dict[str, Any], usage: Any) -> None:
    answer = await post(app, "/v1/chat/completions", CHAT | fields | {"stream": True, "stream_options": usage})
    for frame in frames_of(answer):
        strict(ChatCompletionChunk).model_validate(frame)


@pytest.mark.parametrize("fields", [*COMPLETIONS, {"prompt_logprobs": 1}], ids=str)
async def test_a_whole_completion_is_openais_type_and_what_is_documented(app: ASGIApp, fields: dict[str, Any]) -> None:
    answer = await post(app, "/v1/completions", PROMPT | fields)
    assert answer.status == 200, answer.json
    strict(Completion).model_validate_json(b"".join(answer.parts))


@pytest.mark.parametrize(("fields", "usage"), list(product(COMPLETIONS, USAGES)), ids=str)
async def test_each_chunk_of_a_completion_is_openais_type(app: ASGIApp, fields: dict[str, Any], usage: Any) -> None:
    answer = await post(app, "/v1/completions", PROMPT | fields | {"stream": True, "stream_options": usage})
    for frame in frames_of(answer):
        strict(Completion).model_validate(frame)


async def test_the_served_model_is_openais_type_but_for_what_others_look_for(app: ASGIApp) -> None:
    answer = await Exchange(app, "GET", f"/v1/models/{MODEL.id}", headers=()).finish()
    ours = {"root", "parent", "max_model_len", "context_length", "context_window", "capabilities"}
    others = ours | {"type", "display_name", "created_at"}
    strict(Model).model_validate({name: value for name, value in answer.json.items() if name not in others})


async def test_anthropics_clients_read_a_model_as_their_type(app: ASGIApp) -> None:
    """Their type has an object of other capabilities, or null."""
    headers = (("anthropic-version", "2023-06-01"),)
    one = (await Exchange(app, "GET", f"/v1/models/{MODEL.id}", headers=headers).finish()).json
    states = {"lifecycle": "active", "deprecated_at": None, "retires_at": None, "line": None}
    plain = (await Exchange(app, "GET", f"/v1/models/{MODEL.id}", headers=()).finish()).json
    limits = dict.fromkeys(("max_input_tokens", "max_tokens"), plain["max_model_len"])
    assert one == plain | limits | states | {"capabilities": None}
    listed = (await Exchange(app, "GET", "/v1/models", headers=headers).finish()).json
    assert listed["data"] == [one]
    ModelList.model_validate(listed)


async def test_the_strict_types_refuse_a_field_that_nobody_documented(app: ASGIApp) -> None:
    body = (await post(app, "/v1/chat/completions", CHAT)).json
    for holder in (body, body["choices"][0], body["choices"][0]["message"], body["usage"]):
        holder["colour"] = 1
        with pytest.raises(ValidationError, match="colour"):
            strict(ChatCompletion).model_validate(body)
        del holder["colour"]
    body["choices"][0]["index"] = "0"
    with pytest.raises(ValidationError, match="index"):
        strict(ChatCompletion).model_validate(body)
