"""Owns the promise that tools are called by the long names that MCP servers give them, on every route.
Never reads a call's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve_app.api.generation.test_tools import CALLER, app_of, saying
from tests.serve_app.harness import Answer, post

pytestmark = pytest.mark.anyio

CLAUDE_CODE = "mcp__plugin_chrome-devtools-mcp_chrome-devtools__get_console_message"
LONGEST = "n" * 128
ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
ASKED = {"role": "user", "content": "hi"}


def body_for(route: str, name: str) -> dict[str, Any]:
    """Return a request in which a tool was called and must be called again."""
    function = {"name": name, "parameters": SCHEMA}
    chosen = {"type": "function", "function": {"name": name}}
    if route == "/v1/chat/completions":
        call = {"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "a", "content": "b"}
        tools = [{"type": "function", "function": function}]
        return {"messages": [ASKED, called, result], "tools": tools, "tool_choice": chosen}
    if route == "/v1/messages":
        used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": name, "input": {}}]}
        told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}]}
        offered = {"name": name, "input_schema": SCHEMA}
        choice = {"type": "tool", "name": name}
        return {"messages": [ASKED, used, told], "tools": [offered], "tool_choice": choice, "max_tokens": 99}
    items = [
        {"type": "function_call", "call_id": "a", "name": name, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "b"},
    ]
    tools = [{"type": "function", **function}]
    return {"input": [ASKED, *items], "tools": tools, "tool_choice": {"type": "function", "name": name}}


async def ask(route: str, name: str) -> Answer:
    client = saying(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    return await post(app_of(client), route, {"model": CALLER.id, **body_for(route, name)})


def called_name(route: str, answer: Answer) -> str:
    body = answer.json
    if route == "/v1/chat/completions":
        return str(body["choices"][0]["message"]["tool_calls"][0]["function"]["name"])
    return str((body["content"] if route == "/v1/messages" else body["output"])[0]["name"])


@pytest.mark.parametrize("name", [CLAUDE_CODE, LONGEST], ids=len)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_long_name_is_offered_chosen_called_and_replayed(route: str, name: str) -> None:
    answer = await ask(route, name)
    assert answer.status == 200, answer.json
    assert called_name(route, answer) == name


@pytest.mark.parametrize("route", ROUTES)
async def test_a_name_that_is_longer_is_refused(route: str) -> None:
    assert (await ask(route, LONGEST + "n")).status == 400


async def test_a_namespace_has_a_long_name_too() -> None:
    tools = [{"type": "namespace", "name": CLAUDE_CODE, "tools": [{"type": "function", "name": LONGEST}]}]
    answer = await post(app_of(saying("x")), "/v1/responses", {"model": CALLER.id, "input": "hi", "tools": tools})
    assert answer.status == 200, answer.json
