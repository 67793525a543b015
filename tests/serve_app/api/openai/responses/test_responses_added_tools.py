"""Owns the contract of tools that an item of the input adds: which are told, and what their errors are named.
Never tests what such tools are otherwise; test_responses_tools does."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.http.hint_header import HEADER
from tests.serve_app.api.generation.test_tools import prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import TOOLS, ask, whole_and_streamed
from tests.serve_app.api.openai.responses.test_responses_tools import AGENTS, FORCED, LARK, NOTE, PATCH, call

pytestmark = pytest.mark.anyio


def added(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "id": "at", "tools": list(tools)}


SAID = {"role": "user", "content": "hi"}


async def test_tools_that_an_item_adds_are_told_and_called_like_the_requests_own() -> None:
    """Codex gives all its tools so if it knows the model's name as one of OpenAI's."""
    text = call("agents__close", "{}") + call("weather", "{}")
    response = await whole_and_streamed(text, input=[added(AGENTS), SAID], tools=TOOLS)
    assert [(item.get("namespace"), item["name"]) for item in response["output"]] == [
        ("agents", "close"),
        (None, "weather"),
    ]
    assert [tool["name"] for tool in response["tools"]] == ["weather"]
    prompts = []
    for fields in ({"input": [SAID, added(AGENTS)], "tools": TOOLS}, {"input": [SAID], "tools": [*TOOLS, AGENTS]}):
        client = saying("x")
        assert (await ask(client, **fields)).status == 200
        prompts.append(prompt_of(client))
    assert prompts[0] == prompts[1]


async def test_of_tools_with_one_name_the_requests_own_or_the_last_added_is_told() -> None:
    first, second, third = (TOOLS[0] | {"description": text} for text in ("1st", "2nd", "3rd"))
    other = AGENTS | {"tools": [AGENTS["tools"][0] | {"description": "4th"}]}
    client = saying("x")
    assert (await ask(client, input=[added(first, AGENTS), SAID, added(second, other)])).status == 200
    told = prompt_of(client)
    assert ("1st" in told, "2nd" in told, told.count("agents__close"), "4th" in told) == (False, True, 1, True)
    client = saying("x")
    assert (await ask(client, input=[added(first), SAID], tools=[third])).status == 200
    assert ("1st" in prompt_of(client), "3rd" in prompt_of(client)) == (False, True)


async def test_a_mistake_in_a_tool_that_an_item_adds_is_named_by_its_place() -> None:
    answer = await ask(saying("x"), input=[SAID, added(AGENTS | {"tools": [NOTE, NOTE]})])
    assert (answer.status, answer.error["param"]) == (400, "input.1.tools.0.tools.1.name")
    broken = PATCH | {"format": LARK | {"definition": "start: ("}}
    answer = await ask(saying("x"), input=[SAID, added(broken)], tool_choice=FORCED)
    assert (answer.status, answer.error["param"]) == (400, "input.1.tools.0.format")


async def test_a_hosted_tool_that_an_item_adds_is_a_hint() -> None:
    answer = await ask(saying("x"), input=[SAID, added({"type": "web_search"})])
    assert (answer.status, answer.headers[HEADER]) == (200, "tools.web_search")
    fields = {"input": [SAID, added({"type": "web_search"})], "tool_choice": "required"}
    answer = await ask(saying("x"), **fields)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
