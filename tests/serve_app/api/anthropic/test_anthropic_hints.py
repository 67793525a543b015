"""Owns the contract of hints in Anthropic's requests. Long, a case a hint: each is accepted, changes no prompt, is
named in the response, and is refused by a strict server.
Never tests the fields that change an answer; test_anthropic does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from engine.protocol import ErrorCode, Failed
from serve_app.api.anthropic.message import SIGNATURE
from serve_app.api.generation.sealing import Seal
from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.api.anthropic.test_anthropic import ASK, SCHEMA, TOOLS, events, together
from tests.serve_app.api.generation.test_tools import CALLER, TEMPLATE, THINKER, prompt_of, saying
from tests.serve_app.auth.test_auth import ANNS, BOBS
from tests.serve_app.auth.test_auth import KEYS as TENANTS
from tests.serve_app.harness import Answer, Exchange, ScriptedClient, post, scheduled, tokens

pytestmark = pytest.mark.anyio

EPHEMERAL = {"type": "ephemeral"}
SCOPED = EPHEMERAL | {"scope": "global"}
CLAUDE_CODE = json.loads((Path(__file__).parent / "claude_code.json").read_text())
"""The first request of Claude Code 2.1.197, whose texts and facts about a machine and a session are replaced."""


def app_of(client: ScriptedClient, model: ServedModel = CALLER, template: str = TEMPLATE, **options: Any) -> ASGIApp:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(template, {})
    return create_app(client, tokenizer, model, **options)


async def ask(client: ScriptedClient, body: dict[str, Any], model: ServedModel = CALLER, **options: Any) -> Answer:
    return await post(app_of(client, model, **options), "/v1/messages", body)


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def said(*blocks: Any) -> dict[str, Any]:
    """Return a conversation with these blocks in an assistant's turn, followed by a user's turn."""
    turns = [
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, *blocks]},
        {"role": "user", "content": "b"},
    ]
    return {"messages": [*ASK["messages"], *turns]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOLS[0] | fields]}


TEXT = {"type": "text", "text": "hi"}
CALL = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}
KEEP = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
COMPACTS = {"edits": [{"type": "compact_20260112", "pause_after_compaction": False, "trigger": None}]}
SERVER = {"type": "url", "name": "m", "url": "https://example.com", "authorization_token": "t"}

BODY: dict[str, Any] = {}
SAME_ANSWER: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    # fields, the hint's name, what a strict server's error begins with, fields of the same prompt
    ({"context_management": KEEP}, "context_management", "context_management", BODY),
    ({"context_management": COMPACTS}, "context_management", "context_management", BODY),
    ({"context_management": {}}, "context_management", "context_management", BODY),
    ({"thinking": {"type": "adaptive"}}, "thinking", "thinking", BODY),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking", "thinking", BODY),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}, "thinking", "thinking", BODY),
    (
        {"thinking": {"type": "disabled", "block_binding": {"mismatch": "drop"}}},
        "thinking.block_binding",
        "thinking.block_binding",
        {"thinking": {"type": "disabled"}},
    ),
    ({"output_config": {"effort": "high"}}, "output_config.effort", "output_config.effort", BODY),
    (
        {"messages": [*ASK["messages"], {"role": "system", "content": [], "output_config": {"effort": "high"}}]},
        "messages.output_config.effort",
        "messages.output_config.effort",
        BODY,
    ),
    (
        {"output_config": {"task_budget": {"type": "tokens", "total": 64000}}},
        "output_config.task_budget",
        "output_config.task_budget",
        BODY,
    ),
    ({"mcp_servers": [SERVER]}, "mcp_servers", "mcp_servers", BODY),
    ({"speed": "fast"}, "speed", "speed", BODY),
    ({"cache_control": SCOPED}, "cache_control", "cache_control.scope", BODY),
    ({"cache_control": {"type": "forever", "ttl": 7}}, "cache_control", "cache_control.type", BODY),
    (user(TEXT | {"cache_control": SCOPED}), "cache_control", "messages.0.content.0.text.cache_control.scope", BODY),
    (
        {"system": [{"type": "text", "text": "s", "cache_control": SCOPED}]},
        "cache_control",
        "system.0.",
        {"system": "s"},
    ),
    (tool(cache_control=SCOPED), "cache_control", "tools.0.cache_control.scope", tool()),
    (tool(defer_loading=True), "tools.defer_loading", "tools.0.defer_loading", tool()),
    (tool(input_examples=[{"city": "Oslo"}]), "tools.input_examples", "tools.0.input_examples", tool()),
    (
        tool(allowed_callers=["direct", "code_execution_20250825"]),
        "tools.allowed_callers",
        "tools.0.allowed_callers",
        tool(),
    ),
    (tool(allowed_callers=["code_execution_20260120"]), "tools.allowed_callers", "tools.0.allowed_callers", BODY),
    (
        user(TEXT | {"citations": [{"type": "page_location"}]}),
        "messages.citations",
        "messages.0.content.0.text.cit",
        BODY,
    ),
    (
        said({"type": "redacted_thinking", "data": "gAAA"}),
        "messages.redacted_thinking",
        "messages.1.content.1.type",
        said(),
    ),
    (
        said({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}),
        "messages.fallback",
        "messages.1.content.1.type",
        said(),
    ),
    (
        {"messages": [*said(CALL | {"caller": {"type": "code_execution_20250825"}})["messages"][:-1], RESULT]},
        "messages.caller",
        "messages.1.content.1.tool_use.caller",
        {"messages": [*said(CALL)["messages"][:-1], RESULT]},
    ),
]
OF_AN_ANSWER: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({"service_tier": "priority"}, "service_tier", "service_tier", BODY),
    ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics", "diagnostics", BODY),
    ({"metadata": {"user_id": "u", "team": "t"}}, "metadata", "metadata.team", BODY),
]
ABSENT = {
    "web_search_20250305": "web_search",
    "web_search_20260318": "web_search",
    "web_fetch_20250910": "web_fetch",
    "code_execution_20250825": "code_execution",
    "tool_search_tool_bm25_20251119": "tool_search",
    "tool_search_tool_regex": "tool_search",
    "mcp_toolset": "mcp_toolset",
    "advisor_20260301": "advisor",
    "computer_20250124": "computer",
    "computer_toolset_20260801": "computer_toolset",
    "browser_toolset_20260801": "browser_toolset",
    "bash_20991231": "bash",
}
"""Types of tools that nobody here runs, and what their hints are called."""
SAME_ANSWER += [
    ({"tools": [*TOOLS, {"type": kind, "name": "n", "max_uses": 5}]}, f"tools.{name}", "tools.1.type: a tool", tool())
    for kind, name in ABSENT.items()
]
each_hint = pytest.mark.parametrize(("fields", "name", "refused", "same"), SAME_ANSWER + OF_AN_ANSWER, ids=str)


@each_hint
async def test_a_hint_is_taken_named_and_changes_no_prompt(
    fields: dict[str, Any], name: str, refused: str, same: dict[str, Any]
) -> None:
    client, plain = saying("x"), saying("x")
    answer = await ask(client, ASK | fields)
    assert (answer.status, answer.headers.get(HEADER)) == (200, name), answer.json
    unhinted = await ask(plain, ASK | same, strict=True)
    assert (unhinted.status, HEADER in unhinted.headers) == (200, False), unhinted.json
    assert prompt_of(client) == prompt_of(plain)


@each_hint
async def test_a_strict_server_refuses_each_hint_by_its_field(
    fields: dict[str, Any], name: str, refused: str, same: dict[str, Any]
) -> None:
    client = saying("x")
    answer = await ask(client, ASK | fields, strict=True)
    assert (answer.status, HEADER in answer.headers) == (400, False)
    assert answer.anthropic_error["message"].startswith(refused)
    assert not client.submissions


@pytest.mark.parametrize(("fields", "name", "refused", "same"), SAME_ANSWER, ids=str)
async def test_counting_takes_the_same_hints_and_counts_the_same_prompt(
    fields: dict[str, Any], name: str, refused: str, same: dict[str, Any]
) -> None:
    client = saying("x")
    await ask(client, ASK | fields)
    body = {key: value for key, value in (ASK | fields).items() if key != "max_tokens"}
    counted = await post(app_of(ScriptedClient()), "/v1/messages/count_tokens", body)
    assert (counted.status, counted.headers.get(HEADER)) == (200, name), counted.json
    assert counted.json == {"input_tokens": len(prompt_of(client))}
    strict = await post(app_of(ScriptedClient(), strict=True), "/v1/messages/count_tokens", body)
    assert (strict.status, strict.anthropic_error["message"].startswith(refused)) == (400, True)


PAUSES = {"edits": [KEEP["edits"][0], {"type": "compact_20260112", "pause_after_compaction": True}]}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"inference_geo": "us"}, "inference_geo: "),
        ({"context_management": PAUSES}, "context_management.edits.1.pause_after_compaction: "),
    ],
)
async def test_where_data_goes_and_when_an_answer_pauses_are_no_hints(
    fields: dict[str, Any], named: str, strict: bool
) -> None:
    client = saying("x")
    answer = await ask(client, ASK | fields, strict=strict)
    assert (answer.status, HEADER in answer.headers, client.submissions) == (400, False, [])
    assert answer.anthropic_error["message"].startswith(named)


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "auto", "speed": "standard", "inference_geo": None, "diagnostics": None},
        {"cache_control": EPHEMERAL | {"ttl": "1h"}, "metadata": {"user_id": "u"}},
        tool(eager_input_streaming=True, defer_loading=False, allowed_callers=["direct"], strict=False),
        user(TEXT | {"citations": None, "cache_control": EPHEMERAL}),
        {"thinking": {"type": "disabled"}, "output_config": {"effort": None, "task_budget": None}},
    ],
    ids=str,
)
async def test_what_asks_for_what_is_done_anyway_is_no_hint(fields: dict[str, Any]) -> None:
    answer = await ask(saying("x"), ASK | fields, strict=True)
    assert (answer.status, HEADER in answer.headers) == (200, False), answer.json


# --- thinking and effort --------------------------------------------------------------------------------------------

SHOWS = TEMPLATE + "{% if reasoning_effort is defined %}<e={{ reasoning_effort }}>{% endif %}"
BUDGETS = TEMPLATE + "{% if thinking_budget is defined %}<b={{ thinking_budget }}>{% endif %}"
ENABLED = {"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 3000}


@pytest.mark.parametrize(
    ("effort", "told"), [("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
)
async def test_an_effort_is_told_to_a_template_that_takes_one(effort: str, told: str) -> None:
    client = saying("x")
    answer = await ask(client, ASK | {"output_config": {"effort": effort}}, template=SHOWS, strict=True)
    assert (answer.status, HEADER in answer.headers) == (200, False)
    assert prompt_of(client).endswith(f"<e={told}>")


async def test_the_last_effort_of_a_system_message_overrides_the_requests() -> None:
    """Claude Code states an effort so when its user changes it."""
    low, high = ({"role": "system", "content": [], "output_config": {"effort": effort}} for effort in ("low", "high"))
    turns = [*ASK["messages"], low, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    for messages, told in ((turns, "low"), ([*turns, high, high | {"output_config": {}}], "high")):
        client = saying("x")
        body = ASK | {"messages": messages, "output_config": {"effort": "medium"}}
        answer = await ask(client, body, template=SHOWS, strict=True)
        assert (answer.status, HEADER in answer.headers) == (200, False), answer.json
        assert prompt_of(client) == f"[user:hi][assistant:a][user:b]><e={told}>"


async def test_enabled_thinks_and_its_budget_is_a_hint_unless_the_template_takes_one() -> None:
    client = saying("<think>\nHm.\n</think>\n\nYes.")
    answer = await ask(client, ASK | ENABLED, THINKER)
    assert (answer.headers[HEADER], answer.json["content"][0]["thinking"]) == ("thinking.budget_tokens", "Hm.")
    refused = await ask(saying("x"), ASK | ENABLED, THINKER, strict=True)
    assert refused.anthropic_error["message"].startswith("thinking.budget_tokens: ")
    told = saying("x")
    answer = await ask(told, ASK | ENABLED, THINKER, template=BUDGETS, strict=True)
    assert (answer.status, prompt_of(told)[-8:]) == (200, "<b=2048>")


async def test_a_model_that_thinks_in_any_case_says_that_it_cannot_leave_it() -> None:
    body, plain = ASK | {"thinking": {"type": "disabled"}}, TEMPLATE.replace("enable_thinking", "another")
    answer = await ask(saying("<think>\nHm.\n</think>\n\nYes."), body, THINKER, template=plain)
    assert (answer.status, answer.headers[HEADER]) == (200, "thinking")
    assert answer.json["content"] == [{"type": "text", "text": "Yes."}]
    refused = await ask(saying("x"), body, THINKER, template=plain, strict=True)
    assert (refused.status, refused.anthropic_error["message"][:10]) == (400, "thinking: ")
    for model, template in ((THINKER, TEMPLATE), (CALLER, plain)):
        answer = await ask(saying("x"), body, model, template=template, strict=True)
        assert (answer.status, HEADER in answer.headers) == (200, False)


async def test_with_tools_a_budget_may_be_of_more_than_one_answer() -> None:
    assert (await ask(saying("x"), ASK | ENABLED | {"max_tokens": 9, "tools": TOOLS}, THINKER)).status == 200


async def test_without_a_key_thoughts_that_are_to_be_omitted_are_left_out() -> None:
    client = saying("<think>\nHm.\n</think>\n\nYes.")
    answer = await ask(client, ASK | {"thinking": OMITTED}, THINKER, strict=True)
    assert answer.json["content"] == [{"type": "text", "text": "Yes."}]


KEYS = ["WgRzoCzePWLmXM5Ww86DxfFg_y-bDjjX7A2-PWf5Gko=", "mnQqJokMDLzILsJH7qVQEsu85mskxEDuGSasFqxYrp0="]
OMITTED = {"type": "adaptive", "display": "omitted"}


def thought_of(signature: str | None, thinking: str = "") -> dict[str, Any]:
    """Return a conversation whose last step has thoughts and a call."""
    thought = {"type": "thinking", "thinking": thinking} | ({} if signature is None else {"signature": signature})
    return said(thought, CALL) | {"messages": [*said(thought, CALL)["messages"][:-1], RESULT], "tools": TOOLS}


async def test_thoughts_that_are_omitted_are_sealed_and_come_back() -> None:
    """Regression: Claude Code 2.1.331 asks for this, and the thoughts between its calls were lost: the model continued
    from another prompt than it had written, which the prefix cache did not have."""
    body, text = ASK | {"thinking": OMITTED}, "<think>\nHm.\n</think>\n\nYes."
    whole = await ask(saying(text), body, THINKER, strict=True, seal=Seal(KEYS))
    thought, answer = whole.json["content"]
    assert (thought["thinking"], answer) == ("", {"type": "text", "text": "Yes."})
    assert Seal(KEYS).open(thought["signature"]) == "Hm."
    streamed = events(await ask(saying(text, 3), body | {"stream": True}, THINKER, strict=True, seal=Seal(KEYS)))
    deltas = [one["delta"] for one in streamed if one["type"] == "content_block_delta" and one["index"] == 0]
    assert [delta["type"] for delta in deltas] == ["signature_delta"]
    assert Seal(KEYS).open(deltas[0]["signature"]) == "Hm."
    shown = saying("x")
    await ask(shown, ASK | thought_of("any", "Hm."), THINKER)
    assert "Hm." in prompt_of(shown)
    for signature in (thought["signature"], deltas[0]["signature"], Seal(KEYS[1:]).close("Hm.")):
        client = saying("x")
        answer = await ask(client, ASK | thought_of(signature), THINKER, strict=True, seal=Seal(KEYS))
        assert (answer.status, prompt_of(client)) == (200, prompt_of(shown))
    counted = {name: value for name, value in (ASK | thought_of(thought["signature"])).items() if name != "max_tokens"}
    app = app_of(saying("x"), THINKER, seal=Seal(KEYS))
    answer = await post(app, "/v1/messages/count_tokens", counted)
    assert answer.json == {"input_tokens": len(shown.submissions[0].prompt_token_ids)}


async def test_thoughts_that_were_sealed_for_another_tenant_are_a_hint() -> None:
    """Regression: a key of another tenant opened them, and its owner could have the model repeat them."""
    for key, header, shown in ((ANNS, None, True), (BOBS, "messages.thinking.signature", False)):
        client = saying("x")
        app = app_of(client, THINKER, seal=Seal(KEYS), keys=TENANTS)
        body = json.dumps(ASK | thought_of(Seal(KEYS, "ann").close("ZEBRA"))).encode()
        headers = (("content-type", "application/json"), ("x-api-key", key))
        answer = await Exchange(app, "POST", "/v1/messages", body, headers).finish()
        assert (answer.status, answer.headers.get(HEADER)) == (200, header)
        assert ("ZEBRA" in prompt_of(client)) is shown
        counted = json.dumps({name: one for name, one in json.loads(body).items() if name != "max_tokens"}).encode()
        count = await Exchange(app, "POST", "/v1/messages/count_tokens", counted, headers).finish()
        assert count.json == {"input_tokens": len(client.submissions[0].prompt_token_ids)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_became_too_much_work_is_an_error_of_its_field(stream: bool) -> None:
    """Regression: it named no field, and a stream's error no request."""
    fault = Failed("r", ErrorCode.GRAMMAR_LIMIT_EXCEEDED, "too much work")
    client = ScriptedClient([scheduled()], tokens("{"), [fault])
    body = ASK | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "stream": stream}
    answer = await ask(client, body)
    told = events(answer)[-1] if stream else answer.json
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith("output_config.format.schema: too much work")
    assert told["request_id"] == answer.headers["request-id"]


async def test_two_tools_of_one_name_are_refused_as_by_anthropic() -> None:
    answer = await ask(saying("x"), ASK | {"tools": [*TOOLS, TOOLS[0]]})
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(f"tools.{len(TOOLS)}.name: is the name of two tools, ")


@pytest.mark.parametrize("keys", [KEYS[:1], []])
async def test_thoughts_that_were_sealed_elsewhere_are_a_hint(keys: list[str]) -> None:
    options: dict[str, Any] = {"seal": Seal(keys) if keys else None}
    for signature in (Seal(KEYS[1:]).close("Hm."), "EqQBCgIYAhIM", "é"):
        client, without = saying("x"), saying("x")
        answer = await ask(client, ASK | thought_of(signature), THINKER, **options)
        assert (answer.status, answer.headers[HEADER]) == (200, "messages.thinking.signature")
        await ask(without, ASK | thought_of(None), THINKER, strict=True, **options)
        assert prompt_of(client) == prompt_of(without)
        refused = await ask(saying("x"), ASK | thought_of(signature), THINKER, strict=True, **options)
        assert (refused.status, refused.anthropic_error["message"][:8]) == (400, "messages")
    own = await ask(saying("x"), ASK | thought_of(SIGNATURE), THINKER, strict=True, **options)
    assert (own.status, HEADER in own.headers) == (200, False)


# --- tools that nobody here runs ------------------------------------------------------------------------------------

SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize("kind", ["web_search_20250305", "computer_20250124"])
@pytest.mark.parametrize(
    ("choice", "tools", "named"),
    [
        ({"type": "tool", "name": "n"}, TOOLS, "tool_choice.name: The tool n cannot be used here"),
        ({"type": "any"}, [], "tool_choice: None of the tools can be used here"),
    ],
)
async def test_a_forced_tool_that_nobody_runs_is_refused(kind: str, choice: Any, tools: Any, named: str) -> None:
    client = saying("x")
    body = ASK | {"tools": [*tools, {"type": kind, "name": "n"}], "tool_choice": choice}
    answer = await ask(client, body)
    assert (answer.status, client.submissions) == (400, [])
    assert answer.anthropic_error["message"].startswith(named)


async def test_any_of_the_tools_that_are_left_may_be_forced() -> None:
    client = saying("x")
    answer = await ask(client, ASK | {"tools": [SEARCH, *TOOLS], "tool_choice": {"type": "any"}})
    assert (answer.status, answer.headers[HEADER]) == (200, "tools.web_search")
    assert client.submissions[0].sampling.grammar is not None


async def test_where_no_tool_is_left_a_model_without_calls_answers_too() -> None:
    body = ASK | {"tools": [SEARCH], "tool_choice": {"type": "auto"}}
    assert (await ask(saying("x"), body, replace(CALLER, tool_parser=None))).status == 200


async def test_a_hints_name_is_never_of_the_clients_choosing() -> None:
    mine = "mine, x-evil"
    tools = [{"type": "web_fetch_20991231", "name": mine, mine: 1}]
    body = ASK | {"tools": tools, "cache_control": {mine: 1}, "metadata": {mine: 1}}
    names = (await ask(saying("x"), body)).headers[HEADER]
    assert sorted(names.split(", ")) == ["cache_control", "metadata", "tools.web_fetch"]


# --- Claude Code ----------------------------------------------------------------------------------------------------

LONG = replace(CALLER, max_model_len=131072)
BETAS = [
    ("content-type", "application/json"),
    ("anthropic-version", "of-tomorrow"),
    (
        "anthropic-beta",
        "claude-code-20250219,of-tomorrow,context-management-2025-06-27,mid-conversation-system-2026-04-07",
    ),
    ("x-app", "cli"),
]


async def claude_code(client: ScriptedClient, path: str = "/v1/messages", **options: Any) -> Answer:
    body = CLAUDE_CODE | {"model": LONG.id}
    if path.endswith("count_tokens"):
        left_out = ("max_tokens", "metadata", "stream")
        body = {key: value for key, value in body.items() if key not in left_out}
    data = json.dumps(body).encode()
    return await Exchange(app_of(client, LONG, **options), "POST", f"{path}?beta=true", data, BETAS).finish()


async def test_claude_codes_first_request_is_answered_and_its_hints_are_named() -> None:
    client = saying("hello", pieces=3)
    answer = await claude_code(client)
    assert answer.status == 200
    assert answer.headers[HEADER] == "context_management, output_config.effort, thinking"
    assert together(events(answer))["content"] == [{"type": "text", "text": "hello"}]
    prompt = prompt_of(client)
    assert "x-anthropic-billing-header" not in prompt
    assert prompt.index("[system:Told at length.") < prompt.index("\nhello]") < prompt.rindex("[system:Told at length.")
    counted = await claude_code(ScriptedClient(), "/v1/messages/count_tokens")
    assert counted.json == {"input_tokens": len(client.submissions[0].prompt_token_ids)}


async def test_a_strict_server_refuses_claude_code_by_a_fields_name() -> None:
    answer = await claude_code(saying("x"), strict=True)
    assert (answer.status, answer.anthropic_error["message"][:20]) == (400, "context_management: ")


# --- the billing header ---------------------------------------------------------------------------------------------

HEADER_NAME = "x-anthropic-billing-header:"
BILLING = f"{HEADER_NAME} cc_version=2.1.197.fa0; cc_entrypoint=sdk-cli; cch=1f2e3;"


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("system", "read"),
    [
        (BILLING, ""),
        (f"{BILLING}\nBe brief.", "[system:Be brief.]"),
        (blocks(BILLING), ""),
        (blocks(BILLING, "Be brief.", "Be kind."), "[system:Be brief.\nBe kind.]"),
        (blocks(f"{BILLING}\nBe brief.", "Be kind."), "[system:Be brief.\nBe kind.]"),
        (f"About {BILLING}", f"[system:About {BILLING}]"),
        (blocks(f"About {BILLING}"), f"[system:About {BILLING}]"),
        (f"Be brief.\n{BILLING}", f"[system:Be brief.\n{BILLING}]"),
        ("x-anthropic-billing-headers: none", "[system:x-anthropic-billing-headers: none]"),
        (blocks("Be brief.", BILLING), f"[system:Be brief.\n{BILLING}]"),
        (blocks(BILLING, f"{BILLING}\nBe kind."), f"[system:{BILLING}\nBe kind.]"),
        (f"{BILLING} Be brief.", f"[system:{BILLING} Be brief.]"),
        (
            f"{HEADER_NAME} a. You must never reveal the key.",
            f"[system:{HEADER_NAME} a. You must never reveal the key.]",
        ),
        (f"{HEADER_NAME} key=value", f"[system:{HEADER_NAME} key=value]"),
        (HEADER_NAME, f"[system:{HEADER_NAME}]"),
    ],
    ids=str,
)
async def test_only_a_prompt_that_begins_with_the_billing_header_loses_its_line(system: Any, read: str) -> None:
    client = saying("x")
    answer = await ask(client, ASK | {"system": system})
    assert (prompt_of(client), HEADER in answer.headers) == (f"{read}[user:hi]>", False)


async def test_a_users_words_keep_the_header_and_so_do_all_where_the_setting_is_off() -> None:
    asked, kept = saying("x"), saying("x")
    await ask(asked, ASK | user({"type": "text", "text": BILLING}))
    assert prompt_of(asked) == f"[user:{BILLING}]>"
    await ask(kept, ASK | {"system": blocks(BILLING, "s")}, drop_billing_header=False)
    assert prompt_of(kept) == f"[system:{BILLING}\ns][user:hi]>"


async def test_prompts_that_differ_in_the_billing_header_alone_are_equal() -> None:
    prompts = set()
    for nonce in ("cch=1", "cch=2"):
        client = saying("x")
        await ask(
            client,
            ASK | {"system": blocks(f"{BILLING} {nonce}", "s"), "tools": [{"name": "f", "input_schema": SCHEMA}]},
        )
        prompts.add(prompt_of(client))
    assert len(prompts) == 1
