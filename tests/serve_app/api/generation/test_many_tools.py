"""Owns the contract of requests with as many tools as agents offer that use several servers.
Never tests how a tool is shown to the model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine.build.engine import build_engine
from engine.config import EngineConfig
from serve_app.api.generation import tool_grammars
from serve_app.api.ingress import create_app
from serve_app.api.requests.messages import MAX_TOOLS
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.grammars import schema_work
from tests.serve_app.api.generation.test_structured import choice_of
from tests.serve_app.api.generation.test_tools import CALLER, app_of, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import ask
from tests.serve_app.harness import CHAT, LocalClient, post
from tests.serve_app.parsing.test_many_tools import many_tools

pytestmark = pytest.mark.anyio

ROOMY = replace(CALLER, max_model_len=1_000_000)


def functions(num: int, enum_chars: int = 1, **fields: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x" * enum_chars]}}, "required": ["a"]}
    return [{"type": "function", "name": f"f{number}", "parameters": parameters, **fields} for number in range(num)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
async def test_as_many_tools_are_told_to_the_model_as_agents_offer(path: str) -> None:
    """`test_requests` has the refusal of one tool more."""
    names = [f"mcp__server__{number}" for number in range(MAX_TOOLS)]
    chats = path.startswith("/v1/chat")
    tools = [{"type": "function", "function": {"name": n}} if chats else {"name": n, "input_schema": {}} for n in names]
    client = saying("x")
    answer = await post(
        app_of(client, ROOMY), path, CHAT | {"tools": tools} | ({} if "count" in path else {"max_tokens": 5})
    )
    assert answer.status == 200, answer.json
    assert all(f'"{name}"' in prompt_of(client) for name in names if client.submissions)


async def test_tools_are_strict_by_default_as_long_as_one_grammar_can_hold_them() -> None:
    """An agent with many tools is answered: no request is refused because of strictness it did not ask for."""
    shell = {"type": "shell"}
    few = await ask(saying("x"), ROOMY, tools=[*functions(10, 300), shell])
    assert {tool.get("strict") for tool in few.json["tools"]} == {True, None}
    many = await ask(saying("x"), ROOMY, tools=[*functions(MAX_TOOLS - 1, 300), shell])
    assert (many.status, {tool.get("strict") for tool in many.json["tools"]}) == (200, {False, None})
    large = [functions(1, 60_000 + number, strict=True)[0] | {"name": f"large{number}"} for number in range(18)]
    asked_for = await ask(saying("x"), replace(ROOMY, max_model_len=2**21), tools=large)
    assert (asked_for.status, asked_for.error["param"]) == (400, "tools")
    assert "should give a grammar of at most" in asked_for.error["message"]


@pytest.mark.parametrize(("num_tools", "is_kept"), [(2, True), (3, False)])
async def test_the_pattern_properties_of_all_tools_have_a_limit_together(
    num_tools: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each tool had the limit alone. A hundred of them, in less than a megabyte, kept the thread that
    checks every tenant's grammars for minutes."""
    monkeypatch.setattr(schema_work, "MAX_PATTERN_PAIRS", 50)
    schema = {"type": "object", "patternProperties": {f"^a{number}$": {} for number in range(5)}}
    named = [{"name": f"f{number}", "parameters": schema} for number in range(num_tools)]
    chats = [{"type": "function", "function": one} for one in named]
    for forced in ({"tool_choice": "required"}, {}):
        tools = chats if forced else [{**one, "function": {**one["function"], "strict": True}} for one in chats]
        answer = await post(
            app_of(saying("x")), "/v1/chat/completions", CHAT | {"tools": tools, "max_tokens": 5} | forced
        )
        assert answer.status == (200 if is_kept else 400)
        assert is_kept or "at most 50 over all objects of all tools, but they add up to 75" in answer.error["message"]
    free = await post(app_of(saying("x")), "/v1/chat/completions", CHAT | {"tools": chats})
    assert free.status == 200
    response = await ask(saying("x"), tools=[{"type": "function", **one} for one in named])
    assert [tool["strict"] for tool in response.json["tools"]] == [is_kept] * num_tools


async def test_a_tool_that_cannot_be_strict_leaves_the_others_strict_by_default() -> None:
    """Regression: its patternProperties counted for all tools, although no grammar is made of them."""
    named = {"type": "object", "patternProperties": {f"^a{number}$": {} for number in range(65)}}
    tools = [*functions(1), {"type": "function", "name": "other", "parameters": named}]
    answer = await ask(saying("x"), tools=tools)
    assert [tool["strict"] for tool in answer.json["tools"]] == [True, False]


@pytest.mark.parametrize("most", [1, 9])
async def test_no_tool_is_made_strict_by_default_before_the_work_of_all_is_known(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(tool_grammars, "find_fault", lambda text: compiled.append(text) or "")
    monkeypatch.setattr(schema_work, "MAX_PATTERN_PAIRS", 9)
    schema = {"type": "object", "patternProperties": {f"^a{number}$": {} for number in range(3)}}
    named = [{"type": "function", "name": f"f{number}", "parameters": schema} for number in range(most)]
    await ask(saying("x"), tools=named)
    assert bool(compiled) == (most == 1)


async def test_a_refusal_of_one_tool_names_it_whatever_the_others_are() -> None:
    """Regression: a schema with too many patternProperties was refused as `tools`, without the tool."""
    named = {"type": "object", "patternProperties": {f"^a{number}$": {} for number in range(65)}}
    functions = [{"name": "a", "parameters": {}}, {"name": "b", "parameters": named}]
    tools = [{"type": "function", "function": {**one, "strict": True}} for one in functions]
    answer = await post(app_of(saying("x")), "/v1/chat/completions", CHAT | {"tools": tools, "max_tokens": 5})
    assert (answer.status, answer.error["param"]) == (400, "tools.1.function.parameters")
    assert "at most 64 patternProperties, but one has 65" in answer.error["message"]


async def test_each_of_many_tools_can_be_chosen() -> None:
    client = saying("x")
    chosen = [{"type": "function", "name": f"f{number}"} for number in range(MAX_TOOLS)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": chosen}
    assert (await ask(client, ROOMY, tools=functions(MAX_TOOLS), tool_choice=choice)).status == 200


async def test_tools_of_namespaces_count_as_others() -> None:
    half = {"type": "namespace", "name": "a", "tools": functions(MAX_TOOLS // 2)}
    for rest, status in ((MAX_TOOLS // 2, 200), (MAX_TOOLS // 2 + 1, 400)):
        answer = await ask(saying("x"), ROOMY, tools=[half, *functions(rest)])
        assert answer.status == status, answer.json
    assert answer.error["param"] == "tools"
    assert f"at most {MAX_TOOLS} with those of namespaces, but there are {MAX_TOOLS + 1}" in answer.error["message"]


async def test_one_of_a_thousand_tools_is_called_when_it_must_be_whole_and_streamed() -> None:
    """A real engine follows the grammar of them all, over HTTP. The prompt has their names alone, because here a token
    is a byte."""
    schemas = dict(many_tools())
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate("{% for tool in tools %}{{ tool.function.name }}{% endfor %}", {})
    length = 2**16
    engine = build_engine("", EngineConfig(executor="fake", max_model_len=length, num_kv_blocks=2**13))
    try:
        app = create_app(LocalClient(engine), tokenizer, replace(CALLER, max_model_len=length))
        choice = await choice_of(app, tools=tools, tool_choice="required")
    finally:
        engine.shutdown()
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
