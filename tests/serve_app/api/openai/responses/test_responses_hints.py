"""Owns the promise that hints from clients of /v1/responses are accepted and named, and refused if the server is
strict.
Never tests what constrains an answer: test_responses has those refusals."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.generation.sealing import make_seal
from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.openai.responses.replays import UNREAD
from serve_app.api.openai.responses.tools import HOSTED
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.api.generation.test_tools import CALLER, TEMPLATE, THINKER, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import ASK, TOOLS, valid
from tests.serve_app.api.requests.test_hints import models
from tests.serve_app.harness import Answer, ScriptedClient, post

pytestmark = pytest.mark.anyio

SEALED = ["reasoning.encrypted_content"]
USER = {"role": "user", "content": "hi"}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
SEALED_ELSEWHERE = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "g"}
ENDLESS = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")"'}

HINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"truncation": "auto"}, "truncation", "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "context_management"),
    ({"max_tool_calls": 3}, "max_tool_calls", "max_tool_calls"),
    ({"client_metadata": {"a": "b"}}, "client_metadata", "client_metadata"),
    ({"service_tier": "flex"}, "service_tier", "service_tier"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "stream_options"),
    ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options", "prompt_cache_options"),
    ({"image": {"context_compression": "auto"}}, "image", "image"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "reasoning.summary"),
    ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary", "reasoning.generate_summary"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "reasoning.mode"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort"),
    ({"include": SEALED}, "include.reasoning.encrypted_content", "include.0"),
    (
        {"include": ["message.output_text.logprobs", "web_search_call.action.sources"]},
        "include.web_search_call.action.sources",
        "include.1",
    ),
    ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools.defer_loading", "tools.0.defer_loading"),
    ({"tools": [TOOLS[0] | {"output_schema": {}}]}, "tools.output_schema", "tools.0.output_schema"),
    ({"tools": [{"type": "custom", "name": "a", "format": ENDLESS}]}, "tools.format", "tools.0.format"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
        "tools.web_search",
        "tool_choice.tools.0",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"} | BREAKPOINT]}]},
        "input.content.prompt_cache_breakpoint",
        "input.0.content.0.prompt_cache_breakpoint",
    ),
    ({"input": [SEALED_ELSEWHERE]}, "input.reasoning.encrypted_content", "input.0.encrypted_content"),
    *(({"tools": [*TOOLS, {"type": kind, "x": 1}]}, f"tools.{kind}", "tools.1.type") for kind in HOSTED),
    *(({"input": [USER, {"type": kind, "x": 1}]}, f"input.{kind}", "input.1") for kind in UNREAD),
]


async def ask(
    client: ScriptedClient, *, strict: bool = False, model: Any = CALLER, template: str = TEMPLATE, **fields: Any
) -> Answer:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(template, {})
    app = create_app(client, tokenizer, model, strict=strict, seal=make_seal((), 1))
    return await post(app, "/v1/responses", ASK | fields)


@pytest.mark.parametrize(("fields", "name", "param"), HINTS, ids=str)
async def test_a_hint_is_taken_and_named(fields: dict[str, Any], name: str, param: str) -> None:
    answer = await ask(saying("x"), **fields)
    assert (answer.status, answer.headers.get(HEADER)) == (200, name), answer.json
    valid(answer.json)


@pytest.mark.parametrize(("fields", "name", "param"), HINTS, ids=str)
async def test_a_strict_server_refuses_it_by_the_name_of_its_field(
    fields: dict[str, Any], name: str, param: str
) -> None:
    client = saying("x")
    answer = await ask(client, strict=True, **fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "unsupported_parameter")
    assert not client.submissions
    assert HEADER not in answer.headers


def test_every_hint_of_a_schema_is_among_these() -> None:
    named = {name for _, name, _ in HINTS}
    ours = [model for model in models() if model.__module__.startswith("serve_app.api.openai.responses.")]
    assert {model.hint_path + name for model in ours for name in model.hints} <= named


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "disabled", "stream_options": {"include_obfuscation": False}, "service_tier": "auto"},
        {"context_management": [], "client_metadata": {}, "text": {"verbosity": "medium"}},
        {"reasoning": {"summary": None, "context": "auto", "mode": "standard"}, "include": []},
        {"include": ["message.output_text.logprobs"], "max_tool_calls": None},
    ],
    ids=str,
)
async def test_what_is_done_anyway_is_no_hint(fields: dict[str, Any]) -> None:
    answer = await ask(saying("x"), strict=True, **fields)
    assert (answer.status, HEADER in answer.headers) == (200, False), answer.json


async def test_an_effort_reaches_a_template_that_knows_of_it() -> None:
    client = saying("x")
    answer = await ask(client, template="{{ reasoning_effort }}>", reasoning={"effort": "high"}, strict=True)
    assert (answer.status, HEADER in answer.headers, prompt_of(client)) == (200, False, "high>")
    assert valid(answer.json)["reasoning"] == {"effort": "high", "summary": None}


async def test_without_effort_a_model_that_can_be_told_so_does_not_think() -> None:
    client = saying("x")
    answer = await ask(client, reasoning={"effort": "none"}, strict=True)
    assert (answer.status, HEADER in answer.headers) == (200, False)
    assert prompt_of(client) == "[user:hi]><think>\n\n</think>\n\n"


async def test_an_effort_without_effect_is_not_told_as_one() -> None:
    answer = await ask(saying("x"), reasoning={"effort": "high"})
    assert answer.json["reasoning"] == {"effort": None, "summary": None}


async def test_sealed_thoughts_of_a_model_that_thinks_are_no_hint() -> None:
    answer = await ask(saying("x"), model=THINKER, include=SEALED, strict=True)
    assert (answer.status, HEADER in answer.headers) == (200, False)


async def test_tools_that_the_server_does_not_run_are_neither_told_to_the_model_nor_in_the_answer() -> None:
    client = saying("x")
    answer = await ask(client, tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "s"}])
    assert (prompt_of(client), answer.json["tools"]) == ("[user:hi]>", [])
    assert answer.headers[HEADER] == "tools.web_search, tools.mcp"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search_preview"}, "tool_choice"),
        ({"type": "mcp", "server_label": "s"}, "tool_choice"),
        ("required", "tool_choice"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, "tool_choice.tools"),
    ],
    ids=str,
)
async def test_a_tool_that_the_server_does_not_run_cannot_be_forced(choice: Any, param: str) -> None:
    client = saying("x")
    answer = await ask(client, tools=[{"type": "web_search"}], tool_choice=choice)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "unsupported_parameter")
    assert "this server runs no such tool" in answer.error["message"]
    assert not client.submissions


async def test_an_unknown_type_of_tool_is_refused_by_its_name() -> None:
    answer = await ask(saying("x"), tools=[*TOOLS, {"type": "telephone", "tools": []}])
    assert (answer.status, answer.error["param"]) == (400, "tools.1.type")
    assert "the type telephone is not supported" in answer.error["message"]
