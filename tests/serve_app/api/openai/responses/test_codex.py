"""Owns the promise that Codex works unmodified: bodies as version 0.169.0 sent them, complete except for long texts.
Never runs Codex."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.http.hint_header import HEADER
from tests.serve_app.api.generation.test_tools import CALLER, app_of, prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import events, together
from tests.serve_app.harness import Answer, ScriptedClient, post

pytestmark = pytest.mark.anyio

MODEL = replace(CALLER, max_model_len=40_000)
PATCH = "*** Begin Patch\n*** Add File: b.txt\n+hello\n*** End Patch"


def recorded(name: str) -> dict[str, Any]:
    body = json.loads((Path(__file__).parents[2] / "recorded" / f"{name}.json").read_text())
    assert isinstance(body, dict)
    return body


async def ask(client: ScriptedClient, body: dict[str, Any]) -> Answer:
    return await post(app_of(client, MODEL), "/v1/responses", body | {"model": MODEL.id})


async def test_its_first_turn_is_answered_and_its_hints_are_named() -> None:
    client = saying("Hello.")
    answer = await ask(client, recorded("codex_first_turn"))
    assert answer.status == 200, answer.json
    hints = ["client_metadata", "reasoning.summary", "include.reasoning.encrypted_content", "tools.web_search"]
    assert answer.headers[HEADER].split(", ") == hints
    assert together(events(answer))["output"][0]["content"][0]["text"] == "Hello."
    assert "multi_agent_v1__spawn_agent" in prompt_of(client)


async def test_a_call_of_a_tool_in_a_namespace_is_answered_with_both_names() -> None:
    call = '<tool_call>\n{"name": "multi_agent_v1__close_agent", "arguments": {"target": "a"}}\n</tool_call>'
    response = together(events(await ask(saying(call, 7), recorded("codex_first_turn"))))
    (item,) = response["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "multi_agent_v1", "close_agent")
    body = recorded("codex_first_turn")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "closed"}
    client = saying("Done.")
    answer = await ask(client, body | {"input": [*body["input"], item, output]})
    assert answer.status == 200, answer.json
    assert "!multi_agent_v1__close_agent" in prompt_of(client)
    assert prompt_of(client).endswith("[tool:closed]>")


async def test_a_patch_is_answered_as_free_text() -> None:
    arguments = json.dumps({"input": PATCH})
    call = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    response = together(events(await ask(saying(call, 11), recorded("codex_later_turn"))))
    (item,) = response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)


async def test_a_later_turn_has_its_calls_thoughts_and_late_instructions_where_they_were() -> None:
    client = saying("Bye.")
    answer = await ask(client, recorded("codex_later_turn"))
    assert answer.status == 200, answer.json
    hints = ["client_metadata", "text.verbosity", "include.reasoning.encrypted_content", "tools.tool_search"]
    assert answer.headers[HEADER].split(", ") == [*hints, "tools.web_search", "reasoning.effort"]
    prompt = prompt_of(client)
    places = [prompt.index(part) for part in ("!apply_patch", "[tool:Exit code: 0", "[assistant:Done.?Hm.]", "]>")]
    assert places == sorted(places)
    assert prompt[places[2] :].startswith("[assistant:Done.?Hm.][developer:")


async def test_two_tools_of_one_name_in_a_namespace_are_refused() -> None:
    inner = {"type": "function", "name": "x", "parameters": {"type": "object"}}
    for tools in (
        [{"type": "namespace", "name": "a", "description": "", "tools": [inner, inner]}],
        [{"type": "namespace", "name": "a", "description": "", "tools": [inner]}] * 2,
    ):
        answer = await ask(saying("x"), {"model": CALLER.id, "input": "hi", "tools": tools})
        number = len(tools) - 1
        assert (answer.status, answer.error["param"]) == (400, f"tools.{number}.tools.{1 - number}.name")
        assert "is the name of two tools of the namespace 'a', 'x'" in answer.error["message"]
