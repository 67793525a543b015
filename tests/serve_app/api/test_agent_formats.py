"""Owns the promise that answers in the formats of the models that agents use are parsed over HTTP, with special tokens.
Never tests a grammar or a cut: tests/serve_app/parsing does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol import Token
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.grammars.check import find_fault
from serve_app.parsing.harmony import TAGS
from tests.serve_app.api.generation.test_tools import CALLER, TEMPLATE, TOOLS
from tests.serve_app.harness import CHAT, Answer, ScriptedClient, finished, post, scheduled, tokens

pytestmark = pytest.mark.anyio

GPT_OSS = replace(CALLER, tool_parser="openai", reasoning_parser="openai_gptoss")
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
THOUGHTS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Paris.<|return|>"


def gpt_oss() -> Tokenizer:
    tokenizer = Tokenizer.byte_level()
    first = tokenizer.vocab_size
    tokenizer._core.add_special_tokens(list(TAGS))
    tokenizer.special_texts |= {first + place: tag for place, tag in enumerate(TAGS)}
    tokenizer.tag_ids |= {tag: first + place for place, tag in enumerate(TAGS)}
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    return tokenizer


def written(tokenizer: Tokenizer, text: str) -> list[Token]:
    """Encode the text so that each tag is one token."""
    return [Token("r", token_id) for token_id in tokenizer.encode(text)]


async def ask(text: str, **fields: Any) -> Answer:
    tokenizer = gpt_oss()
    client = ScriptedClient([scheduled()], written(tokenizer, text), [finished()])
    return await post(create_app(client, tokenizer, GPT_OSS), "/v1/chat/completions", CHAT | fields)


async def test_a_call_after_thoughts_is_a_tool_call_and_no_tag_is_shown() -> None:
    choice = (await ask(THOUGHTS + CALL, tools=TOOLS)).json["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "Hm.")
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_an_answer_is_its_final_message(tools: list[Any] | None) -> None:
    message = (await ask(THOUGHTS + FINAL, **({"tools": tools} if tools else {}))).json["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Paris.", "Hm.")


async def test_a_forced_call_is_constrained_behind_free_thoughts() -> None:
    tokenizer = gpt_oss()
    client = ScriptedClient([scheduled()], written(tokenizer, THOUGHTS + CALL), [finished()])
    body = CHAT | {"tools": TOOLS, "tool_choice": "required"}
    await post(create_app(client, tokenizer, GPT_OSS), "/v1/chat/completions", body)
    grammar = client.submissions[0].sampling.grammar
    assert grammar is not None
    rules = [entry.get("lark_grammar", "") for entry in json.loads(grammar)["grammars"]]
    assert "thoughts* @answer" in rules[0]
    assert "functions." in rules[1]
    assert '"weather"' in rules[1]


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
async def test_a_constrained_answer_is_framed_as_the_final_message(tools: dict[str, Any]) -> None:
    tokenizer = gpt_oss()
    client = ScriptedClient([scheduled()], written(tokenizer, FINAL), [finished()])
    body = CHAT | tools | {"response_format": {"type": "json_object"}}
    await post(create_app(client, tokenizer, GPT_OSS), "/v1/chat/completions", body)
    grammar = client.submissions[0].sampling.grammar
    assert grammar is not None
    assert not find_fault(grammar)
    (framed,) = [entry for entry in json.loads(grammar)["grammars"] if "@content" in entry.get("lark_grammar", "")]
    assert '"final"' in framed["lark_grammar"]


async def test_an_id_that_the_model_gave_its_call_is_the_calls() -> None:
    text = "<|tool_call_begin|>functions.weather:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    client = ScriptedClient([scheduled()], tokens(text), [finished()])
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(TEMPLATE, {})
    app = create_app(client, tokenizer, replace(CALLER, tool_parser="kimi_k2"))
    answer = await post(app, "/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert answer.json["choices"][0]["message"]["tool_calls"][0]["id"] == "functions.weather:7"
