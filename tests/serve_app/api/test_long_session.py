"""Owns the promise that a long conversation with tools is cheap: what a program sends back is read from the cache.
Never measures time: what a turn computes is counted in tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.harness import LocalClient, post

pytestmark = pytest.mark.anyio

Json = dict[str, Any]

NUM_TURNS, KILLED_AT, COMPACTED_AT = 43, 15, 30
BLOCK = 16
SHARE = 0.95
MODEL = ServedModel(id="org/agent", max_model_len=131_072, created=0, tool_parser="hermes", reasoning_parser="qwen3")
# Qwen3's form of a conversation: tools in the system turn, thoughts of the turns since the user spoke, JSON in tags.
TEMPLATE = (
    "<|im_start|>system\n{{ messages[0].content }}{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% for m in messages[1:] %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"path": "src/main.py", "limit": 40, "name": "é"}
REPLY = (
    "<think>\nThe file has to be read.\n</think>\n\n<tool_call>\n"
    f'{{"name": "read", "arguments": {json.dumps(CALL, ensure_ascii=False)}}}\n</tool_call>'
)
SYSTEM = "You change files. " + "Be careful with everything that you touch. " * 450
SUMMARY = "What was done so far: " + "a file was read and changed. " * 40
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}


def result(turn: int) -> str:
    return f"turn {turn}\n" + "".join(f"{turn * 40 + line}: x = {line}\n" for line in range(30))


@dataclass
class Chat:
    """A program that speaks OpenAI's chat API."""

    path = "/v1/chat/completions"
    said: list[Json] = field(default_factory=list)

    def user(self, text: str) -> None:
        self.said.append({"role": "user", "content": text})

    def body(self) -> Json:
        tool = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
        return {"messages": [{"role": "system", "content": SYSTEM}, *self.said], "tools": [tool], "max_tokens": 300}

    def take(self, answer: Json, turn: int) -> tuple[int, int]:
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("read", CALL)
        self.said.append({name: message[name] for name in ("role", "content", "reasoning_content", "tool_calls")})
        self.said.append({"role": "tool", "tool_call_id": call["id"], "content": result(turn)})
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Messages(Chat):
    """A program that speaks Anthropic's messages API."""

    path = "/v1/messages"

    def body(self) -> Json:
        tool = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
        return {"system": SYSTEM, "messages": self.said, "tools": [tool], "max_tokens": 300}

    def take(self, answer: Json, turn: int) -> tuple[int, int]:
        (call,) = (block for block in answer["content"] if block["type"] == "tool_use")
        assert (call["name"], call["input"]) == ("read", CALL)
        self.said.append({"role": "assistant", "content": answer["content"]})
        told = {"type": "tool_result", "tool_use_id": call["id"], "content": result(turn)}
        self.said.append({"role": "user", "content": [told]})
        usage = answer["usage"]
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


class Responses(Chat):
    """A program that speaks OpenAI's Responses API."""

    path = "/v1/responses"

    def body(self) -> Json:
        tool = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA, "strict": False}
        return {"instructions": SYSTEM, "input": self.said, "tools": [tool], "max_output_tokens": 300}

    def take(self, answer: Json, turn: int) -> tuple[int, int]:
        (call,) = (item for item in answer["output"] if item["type"] == "function_call")
        assert (call["name"], json.loads(call["arguments"])) == ("read", CALL)
        self.said += answer["output"]
        self.said.append({"type": "function_call_output", "call_id": call["call_id"], "output": result(turn)})
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def app_of_a_new_engine() -> tuple[ASGIApp, Callable[[], None]]:
    config = EngineConfig(
        executor="fake",
        fake=FakeConfig(reply=REPLY),
        block_size=BLOCK,
        max_model_len=MODEL.max_model_len,
        num_kv_blocks=MODEL.max_model_len // BLOCK,
        max_num_batched_tokens=8192,
    )
    engine = build_engine(MODEL.id, config)
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    return create_app(LocalClient(engine), tokenizer, MODEL), engine.shutdown


@pytest.mark.parametrize("program", [Chat, Messages, Responses])
async def test_a_long_session_is_read_from_the_cache(program: type[Chat]) -> None:
    """Nearly all that was sent before is read from the cache. Except in the turn after its engine was lost, a turn
    computes only what is new, and what is left of a block."""
    app, end = app_of_a_new_engine()
    asks, before = program(), 0
    sent_again = from_cache = 0
    try:
        asks.user("Change main.py.")
        for turn in range(NUM_TURNS):
            if turn == KILLED_AT:
                end()
                app, end = app_of_a_new_engine()
            if turn == COMPACTED_AT:
                asks.said.clear()
                asks.user(SUMMARY)
            if turn % 10 == 9:
                asks.user(f"Go on with part {turn}.")
            answer = await post(app, asks.path, asks.body() | {"model": MODEL.id})
            assert answer.status == 200, answer.json
            prompt, cached = asks.take(answer.json, turn)
            if turn == COMPACTED_AT:
                before = len(SYSTEM)
            if turn not in (0, KILLED_AT):
                assert cached > before - BLOCK, f"turn {turn}: {cached} of {prompt}, {before} had been there"
            sent_again, from_cache = sent_again + before, from_cache + min(cached, before)
            before = prompt + len(REPLY.encode())
    finally:
        end()
    assert from_cache >= SHARE * sent_again, f"{from_cache} of {sent_again}"
