"""Owns the contract of minor fields that chat clients send:
efforts, OpenRouter's and others' extensions, developer turns.
Never tests whether each hint is named, and refused by a strict server: test_hints does so for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate, TemplateFailed
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    Answer,
    ScriptedClient,
    app_for,
    chat,
    complete,
    finished,
    post,
    said,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

CHATS = "/v1/chat/completions"
THINKER = replace(MODEL, reasoning_parser="qwen3")
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
EFFORT = PLAIN + "|{{ reasoning_effort | default('-') }}"
SWITCH = PLAIN + "|{{ enable_thinking | default('-') }}"
BOTH = PLAIN + "|{{ reasoning_effort | default('-') }}|{{ enable_thinking | default('-') }}"


async def ask(
    template: str,
    model: ServedModel = MODEL,
    *,
    strict: bool = False,
    path: str = "/v1/chat/completions",
    **fields: Any,
) -> tuple[Answer, str | None, str | None]:
    """Return the answer, the prompt, and the hints that had no effect."""
    tokenizer, client = Tokenizer.byte_level(), ScriptedClient([scheduled()], tokens("hello"), [finished()])
    tokenizer._chat_template = ChatTemplate(template, {})
    answer = await post(create_app(client, tokenizer, model, strict=strict), path, CHAT | fields)
    prompt = bytes(client.submissions[0].prompt_token_ids).decode() if client.submissions else None
    return answer, prompt, answer.headers.get(HEADER)


@pytest.mark.parametrize(
    ("template", "fields", "prompt"),
    [
        (EFFORT, {"reasoning_effort": "high"}, "hi|high"),
        (EFFORT, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "hi|low"),
        (SWITCH, {"reasoning_effort": "none"}, "hi|False"),
        (SWITCH, {"enable_thinking": True}, "hi|True"),
        (SWITCH, {"enable_thinking": False}, "hi|False"),
        (SWITCH, {"reasoning": {"enabled": False}}, "hi|False"),
        (SWITCH, {"reasoning": {"enabled": True}}, "hi|True"),
        (BOTH, {"reasoning_effort": "high", "enable_thinking": False}, "hi|high|False"),
        (PLAIN, {"reasoning_effort": None}, "hi"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
async def test_an_effort_is_used_where_the_template_has_a_variable_for_it(
    template: str, fields: dict[str, Any], prompt: str, strict: bool
) -> None:
    answer, found, ignored = await ask(template, THINKER, strict=strict, **fields)
    assert (answer.status, found, ignored) == (200, prompt, None)


@pytest.mark.parametrize(
    ("template", "fields", "name"),
    [
        (PLAIN, {"reasoning_effort": "high"}, "reasoning_effort"),
        (PLAIN, {"reasoning_effort": "none"}, "reasoning_effort"),
        (SWITCH, {"reasoning_effort": "low"}, "reasoning_effort"),
        (PLAIN, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (PLAIN, {"reasoning": {"enabled": False}}, "reasoning.enabled"),
        (PLAIN, {"enable_thinking": False}, "enable_thinking"),
        (PLAIN, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        (PLAIN, {"chat_template_kwargs": {"reasoning_effort": "low"}}, "chat_template_kwargs.reasoning_effort"),
    ],
)
async def test_an_effort_that_the_template_can_do_nothing_with_is_a_hint(
    template: str, fields: dict[str, Any], name: str
) -> None:
    answer, prompt, ignored = await ask(template, THINKER, **fields)
    assert (answer.status, prompt and prompt.partition("|")[0], ignored) == (200, "hi", name)
    answer, prompt, ignored = await ask(template, THINKER, strict=True, **fields)
    assert (answer.status, prompt, ignored) == (400, None, None)
    assert (answer.error["param"], answer.error["code"]) == (name, "unsupported_parameter")
    assert name in answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
async def test_a_model_that_never_thinks_may_be_told_not_to(fields: dict[str, Any]) -> None:
    answer, prompt, ignored = await ask(PLAIN, MODEL, strict=True, **fields)
    assert (answer.status, prompt, ignored) == (200, "hi", None)


async def test_what_the_template_is_given_by_its_own_name_wins_over_an_effort() -> None:
    fields: dict[str, Any] = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
    _, prompt, ignored = await ask(EFFORT, THINKER, **fields)
    assert (prompt, ignored) == ("hi|low", "reasoning_effort")


async def test_a_prompts_tokens_are_those_of_the_chat_with_that_effort() -> None:
    answer, _, _ = await ask(EFFORT, THINKER, path="/tokenize", reasoning_effort="high")
    assert bytes(answer.json["tokens"]) == b"hi|high"


async def test_openrouters_exclude_hides_what_the_model_thinks() -> None:
    client = ScriptedClient([scheduled()], tokens("<think>\nHm.\n</think>\n\nYes."), [finished()])
    app = create_app(client, Tokenizer.byte_level(), THINKER)
    for fields, thought in (({}, "Hm."), ({"reasoning": {"exclude": True}}, None)):
        message = (await post(app, "/v1/chat/completions", CHAT | fields)).json["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("Yes.", thought)


@pytest.mark.parametrize("ask_for", [chat, complete])
async def test_openrouters_usage_ends_a_stream_as_openais_option_does(ask_for: Any) -> None:
    client = ScriptedClient([scheduled()], tokens("hello"), [finished()])
    asked = await ask_for(client, stream=True, usage={"include": True})
    assert HEADER not in asked.headers
    assert (asked.frames[-1]["choices"], asked.frames[-1]["usage"]["completion_tokens"]) == ([], 5)
    whole = await ask_for(client, usage={"include": True})
    assert whole.json["usage"]["completion_tokens"] == 5


MARK = {"type": "ephemeral", "ttl": "1h", "scope": "x"}


async def test_marks_of_prefixes_are_taken_wherever_a_client_puts_them_and_reach_no_template() -> None:
    part = {"type": "text", "text": "hi", "cache_control": MARK, "prompt_cache_breakpoint": {"mode": "explicit"}}
    function = {"name": "f", "cache_control": MARK}
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": [part], "cache_control": MARK}],
        "tools": [{"type": "function", "function": function, "cache_control": MARK}],
        "cache_control": MARK,
    }
    template = "{{ tools | tojson }}{{ messages | tojson }}"
    answer, prompt, ignored = await ask(template, replace(MODEL, tool_parser="hermes"), **asked)
    assert answer.status == 200, answer.json
    names = {"cache_control", "messages.cache_control", "messages.content.cache_control"}
    names |= {"messages.content.prompt_cache_breakpoint", "tools.cache_control", "tools.function.cache_control"}
    assert set((ignored or "").split(", ")) == names
    bare: dict[str, Any] = {"messages": CHAT["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert prompt == (await ask(template, replace(MODEL, tool_parser="hermes"), **bare))[1]


async def test_a_fallback_model_is_a_hint_beside_one_that_is_served_and_no_help_beside_one_that_is_not() -> None:
    app = app_for(ScriptedClient([scheduled()], tokens("hello"), [finished()]))
    fallback = {"models": ["org/other"], "route": "fallback"}
    answer = await post(app, "/v1/chat/completions", CHAT | fallback)
    assert (answer.status, answer.headers[HEADER], said(answer.json["choices"][0]["message"])["content"]) == (
        200,
        "models, route",
        "hello",
    )
    answer = await post(app, "/v1/chat/completions", CHAT | {"model": "org/other", "models": [MODEL.id]})
    assert (answer.status, answer.error["param"]) == (404, "model")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "openrouter": (
        {"content": "a", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        "messages.reasoning_details",
    ),
    "gemini": (
        {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "extra_content": {"google": {"a": "b"}}}]},
        "messages.tool_calls.extra_content",
    ),
    "litellm, anthropic": (
        {"reasoning_content": "hm", "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        "messages.thinking_blocks",
    ),
    "litellm, openai": ({"content": "a", "reasoning_items": [{"type": "reasoning"}]}, "messages.reasoning_items"),
    "litellm, gemini": (
        {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "provider_specific_fields": {"a": "b"}}]},
        "messages.tool_calls.provider_specific_fields",
    ),
    "litellm, gemini's function": (
        {"tool_calls": [{"function": {"name": "f", "arguments": "{}", "provider_specific_fields": {"a": "b"}}}]},
        "messages.tool_calls.function.provider_specific_fields",
    ),
}


@pytest.mark.parametrize("provider", OTHERS)
async def test_a_turn_of_another_provider_is_taken_without_what_only_that_provider_reads(provider: str) -> None:
    turn, name = OTHERS[provider]
    message = {"role": "assistant", "content": None} | turn
    answer, prompt, ignored = await ask("{{ messages | tojson }}", messages=[message, *CHAT["messages"]])
    assert (answer.status, ignored) == (200, name), answer.json
    assert prompt is not None
    assert name.rpartition(".")[2] not in prompt


async def test_images_that_another_provider_drew_are_refused_because_the_model_would_not_see_them() -> None:
    for images in ([], None):
        turn = {"role": "assistant", "content": "a", "images": images, "thinking_blocks": [], "reasoning_items": []}
        answer, _, ignored = await ask(SHOWS, messages=[turn, *CHAT["messages"]], strict=True)
        assert (answer.status, ignored) == (200, None)
    turn = {"role": "assistant", "content": "a", "images": [{"type": "image_url", "image_url": {"url": "data:a"}}]}
    answer, _, _ = await ask(SHOWS, messages=[turn, *CHAT["messages"]])
    told = answer.error["param"], answer.error["code"]
    assert (answer.status, *told) == (400, "messages.0.images", "unsupported_parameter")


@pytest.mark.parametrize(
    ("turn", "read"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well.\nNo."),
        ({"content": [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]}, "Well.\nNo."),
        ({"content": "Well.", "refusal": None}, "Well."),
    ],
    ids=str,
)
async def test_a_refusal_from_another_server_is_read_as_the_assistants_words(turn: dict[str, Any], read: str) -> None:
    answer, prompt, ignored = await ask(SHOWS, messages=[{"role": "assistant"} | turn, *CHAT["messages"]])
    assert (answer.status, prompt, ignored) == (200, f"[assistant:{read}][user:hi]", None)


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"content": "a", "refusal": "No."}, "messages.0.refusal"),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "messages.0.content"),
    ],
    ids=str,
)
async def test_only_the_assistant_refuses(turn: dict[str, Any], param: str) -> None:
    answer, _, _ = await ask(SHOWS, messages=[{"role": "user"} | turn])
    assert (answer.status, answer.error["param"]) == (400, param)


DROPS = "{% for m in messages %}{% if m.role != 'developer' %}[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
REFUSES = (
    "{% for m in messages %}{% if m.role not in ('system', 'user') %}"
    "{{ raise_exception('Unexpected role.') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
SHOWS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(("template", "role"), [(DROPS, "system"), (REFUSES, "system"), (SHOWS, "developer")])
async def test_a_developers_words_are_the_systems_where_the_template_would_lose_them(template: str, role: str) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *CHAT["messages"]]
    answer, prompt, ignored = await ask(template, messages=messages)
    assert (answer.status, prompt, ignored) == (200, f"[{role}:Be brief.][user:hi]", None)


def test_a_role_that_no_template_knows_is_still_the_templates_to_refuse() -> None:
    with pytest.raises(TemplateFailed, match="Unexpected role"):
        ChatTemplate(REFUSES, {}).render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("used", "given"),
    [
        ("opts | dictsort", 1),
        ("opts | dictsort", "x"),
        ("opts | xmlattr", [1]),
        ("opts.a.b.c", 1),
        ("opts + 1", "x"),
        ("'words' | truncate(opts)", -1),
    ],
)
async def test_what_a_template_cannot_do_with_a_requests_value_is_a_400(used: str, given: Any) -> None:
    answer, _, _ = await ask(f"{PLAIN}{{{{ {used} }}}}", chat_template_kwargs={"opts": given})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "messages", "invalid_value")


COPILOTS: dict[str, Any] = {
    "copilot_cache_control": {"type": "ephemeral"},
    "copilot_references": [{"type": "file", "id": "a.py"}],
    "copilot_confirmations": [{"state": "accepted"}],
    "cot_id": "cot_1",
    "cot_summary": "Hm.",
}


@pytest.mark.parametrize("name", COPILOTS)
async def test_what_copilot_keeps_on_a_message_is_a_hint_and_reaches_no_template(name: str) -> None:
    """VS Code's Copilot with a key of one's own sends them on every turn; its first request was refused."""
    message = {"role": "assistant", "content": "a", name: COPILOTS[name]}
    answer, prompt, ignored = await ask("{{ messages | tojson }}", messages=[message, *CHAT["messages"]])
    assert (answer.status, ignored) == (200, f"messages.{name}")
    assert prompt is not None
    assert name not in prompt
