"""Owns the contract of the tools that clients run and OpenAI defines: `local_shell`, `shell` and `apply_patch`.
Never runs one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.protocol import FinishReason
from serve_app.api.http.hint_header import HEADER
from serve_app.parsing.call_grammars import CALL_GRAMMARS
from serve_app.parsing.deltas import collect
from serve_app.parsing.tools import TOOL_PARSERS
from tests.serve_app.api.generation.test_tools import prompt_of, saying
from tests.serve_app.api.openai.responses.test_responses import TOOLS, ask, events, together, valid, whole_and_streamed
from tests.serve_app.api.openai.responses.test_responses_tools import WALKER, call, forced_family

pytestmark = pytest.mark.anyio

KINDS = ("local_shell", "shell", "apply_patch")
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "local_shell",
        {"command": ["ls", "-l"], "working_directory": "/"},
        {"action": {"command": ["ls", "-l"], "working_directory": "/", "type": "exec", "env": {}}},
    ),
    ("shell", {"commands": ["ls", "pwd"], "timeout_ms": 5}, {"action": {"commands": ["ls", "pwd"], "timeout_ms": 5}}),
    (
        "apply_patch",
        {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b"},
        {"operation": {"type": "update_file", "path": "a", "diff": "@@\n-a\n+b"}},
    ),
    (
        "apply_patch",
        {"type": "create_file", "path": "a"},
        {"operation": {"type": "create_file", "path": "a", "diff": ""}},
    ),
    (
        "apply_patch",
        {"type": "delete_file", "path": "a", "diff": ""},
        {"operation": {"type": "delete_file", "path": "a"}},
    ),
]


@pytest.mark.parametrize(("kind", "arguments", "fields"), CALLS, ids=str)
async def test_a_call_is_an_item_of_its_own_and_is_sent_back_as_the_model_wrote_it(
    kind: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    response = await whole_and_streamed(call(kind, json.dumps(arguments)), tools=[{"type": kind}])
    (item,) = response["output"]
    assert (item["type"], item["status"]) == (f"{kind}_call", "completed")
    assert {name: item[name] for name in fields} == fields
    assert response["tools"] == [{"type": kind}]
    client = saying("x")
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    assert (await ask(client, input=[item], template=template)).status == 200
    back = json.loads(prompt_of(client))
    diff = {"diff": ""} if arguments.get("type") == "create_file" else {}
    sent = {name: value for name, value in arguments.items() if value != ""}
    assert back == {"name": kind, "arguments": sent | diff}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", ['{"colour": 1}', '{"comm'])
async def test_arguments_that_are_none_of_the_tools_are_a_functions(kind: str, arguments: str) -> None:
    text = call(kind, arguments) if arguments.endswith("}") else call(kind, arguments).partition("comm")[0] + "comm"
    reason = FinishReason.STOP if arguments.endswith("}") else FinishReason.LENGTH
    response = await whole_and_streamed(text, reason=reason, tools=[{"type": kind}])
    (item,) = response["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", kind, arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(CALL_GRAMMARS))
async def test_a_forced_call_is_one_of_the_tool(family: str, kind: str) -> None:
    client = saying("x")
    tools = [*TOOLS, {"type": kind}]
    answer = await ask(client, forced_family(family), tools=tools, tool_choice={"type": kind})
    assert answer.status == 200, answer.json
    grammar = client.submissions[0].sampling.grammar
    assert grammar is not None
    prompt = prompt_of(client)
    told = json.loads(prompt[1 : prompt.index("[user")])
    for seed in range(3):
        text = WALKER.walk(grammar, (kind, seed))
        parser = TOOL_PARSERS[family](told)
        (made,) = collect([*parser.push(text), *parser.flush()]).calls
        assert made.name == kind
        answer = await ask(saying(text), forced_family(family), tools=tools)
        assert valid(answer.json)["output"][0]["type"] == f"{kind}_call", made


async def test_a_patch_that_was_cut_off_after_its_last_character_is_of_openais_types() -> None:
    text = call("apply_patch", '{"type": "delete_file", "path": "a"}').removesuffix("}\n</tool_call>")
    response = await whole_and_streamed(text, reason=FinishReason.LENGTH, tools=[{"type": "apply_patch"}])
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "in_progress")


async def test_a_tool_that_shares_its_name_is_told_apart() -> None:
    custom = {"type": "custom", "name": "apply_patch"}
    client = saying("x")
    assert (await ask(client, tools=[custom, {"type": "apply_patch"}])).status == 200
    prompt = prompt_of(client)
    first, second = (tool["function"]["name"] for tool in json.loads(prompt[1 : prompt.index("[user")]))
    assert first == "apply_patch" != second
    text = call(second, '{"type": "delete_file", "path": "a"}')
    found = together(events(await ask(saying(text, 3), tools=[custom, {"type": "apply_patch"}], stream=True)))
    assert found["output"][0]["type"] == "apply_patch_call"


@pytest.mark.parametrize("kind", KINDS)
async def test_two_tools_of_one_type_are_refused_for_a_call_names_the_type_alone(kind: str) -> None:
    client = saying("x")
    answer = await ask(client, tools=[{"type": kind}, *TOOLS, {"type": kind}], tool_choice={"type": kind})
    assert (answer.status, answer.error["param"]) == (400, f"tools.{len(TOOLS) + 1}.type")
    assert f"a second tool of type {kind}" in answer.error["message"]
    assert not client.submissions


async def test_skills_of_a_local_shell_are_told_to_the_model() -> None:
    client = saying("x")
    shell = {"type": "shell", "environment": {"type": "local", "skills": [{"name": "sew", "path": "/s"}]}}
    answer = await ask(client, tools=[shell])
    assert (answer.status, HEADER in answer.headers) == (200, False)
    assert "Skills:" in prompt_of(client)
    assert '\\"name\\": \\"sew\\"' in prompt_of(client)


async def test_a_shell_in_a_container_is_not_run_by_the_server() -> None:
    client = saying("x")
    answer = await ask(client, tools=[{"type": "shell", "environment": {"type": "container_auto"}}])
    assert (answer.status, answer.headers[HEADER], prompt_of(client)) == (200, "tools.shell", "[user:hi]>")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tool_that_is_not_offered_cannot_be_chosen(kind: str) -> None:
    answer = await ask(saying("x"), tools=TOOLS, tool_choice={"type": kind})
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
