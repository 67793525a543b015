"""Owns the promise that what a request says about thinking has the same effect on every route,
whatever the field's name.
Never tests how thoughts are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.api.http.hint_header import HEADER
from serve_app.api.ingress import create_app
from serve_app.api.requests.effort import EFFORTS, KEEPING, SWITCHES
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.api.generation.test_tools import prompt_of, saying
from tests.serve_app.harness import MODEL, Answer, post

pytestmark = pytest.mark.anyio

PLAINLY = replace(MODEL, max_model_len=4000)
THINKER = replace(PLAINLY, reasoning_parser="qwen3")


def template(*variables: str, before: str = "") -> str:
    """Make a template that writes which of these variables it is given."""
    told = "".join(f"{{% if {name} is defined %}} {name}={{{{ {name} }}}}{{% endif %}}" for name in variables)
    return before + "{% for m in messages %}{{ m.content }}{% endfor %}" + told


LEVELS = template("reasoning_effort")
WITH_NONE = template(
    "reasoning_effort",
    before="{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('none or high') }}{% endif %}",
)
WITH_MAX = template("reasoning_effort", before="{% if reasoning_effort == 'max' %}!{% endif %}")
SWITCH = template("enable_thinking")
OTHER_SWITCH = template("thinking")
BOTH = template("reasoning_effort", "enable_thinking")
BUDGET = template("thinking_budget")
NONE = template()

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000},
}


def effort(value: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return, for each route, the fields that ask for the effort, and the field's name."""
    return {
        "/v1/chat/completions": ({"reasoning_effort": value}, "reasoning_effort"),
        "/v1/responses": ({"reasoning": {"effort": value}}, "reasoning.effort"),
        "/v1/messages": ({"output_config": {"effort": value}}, "output_config.effort"),
    }


def thinking(wanted: bool) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the same for whether to think; no field of a response says it."""
    return {
        "/v1/chat/completions": ({"enable_thinking": wanted}, "enable_thinking"),
        "/v1/messages": ({"thinking": {"type": "adaptive" if wanted else "disabled"}}, "thinking"),
    }


BUDGETED = {
    "/v1/chat/completions": ({"thinking_budget": 1024}, "thinking_budget"),
    "/v1/messages": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
}

LOWEST_TO_MOST = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
TABLE: list[tuple[str, dict[str, tuple[dict[str, Any], str]], str, bool]] = [
    # the template, the fields, what the template is given, whether they had an effect
    *((LEVELS, effort(value), f" reasoning_effort={told}", True) for value, told in LOWEST_TO_MOST.items()),
    (LEVELS, effort("none"), " reasoning_effort=low", False),
    *((WITH_NONE, effort(value), " reasoning_effort=high", True) for value in LOWEST_TO_MOST),
    (WITH_NONE, effort("none"), " reasoning_effort=none", True),
    (WITH_MAX, effort("max"), " reasoning_effort=max", True),
    (WITH_MAX, effort("xhigh"), " reasoning_effort=high", True),
    *((SWITCH, effort(value), "", False) for value in LOWEST_TO_MOST),
    (SWITCH, effort("none"), " enable_thinking=False", True),
    (OTHER_SWITCH, effort("none"), " thinking=False", True),
    (BOTH, effort("none"), " enable_thinking=False", True),
    (BOTH, effort("max"), " reasoning_effort=high", True),
    *((where, effort(value), "", False) for value in EFFORTS for where in (NONE, BUDGET)),
    (SWITCH, thinking(True), " enable_thinking=True", True),
    (SWITCH, thinking(False), " enable_thinking=False", True),
    (OTHER_SWITCH, thinking(True), " thinking=True", True),
    (OTHER_SWITCH, thinking(False), " thinking=False", True),
    (LEVELS, thinking(True), "", True),
    (LEVELS, thinking(False), " reasoning_effort=low", False),
    (WITH_NONE, thinking(True), " reasoning_effort=high", True),
    (WITH_NONE, thinking(False), " reasoning_effort=none", True),
    (NONE, thinking(True), "", True),
    (NONE, thinking(False), "", False),
    (BUDGET, BUDGETED, " thinking_budget=1024", True),
    (LEVELS, BUDGETED, "", False),
    (SWITCH, {"/v1/chat/completions": BUDGETED["/v1/chat/completions"]}, "", False),
    (NONE, BUDGETED, "", False),
]
ROWS = [
    pytest.param(source, path, *fields[path], told, has_effect, id=f"{told}-{path}-{fields[path][0]}")
    for source, fields, told, has_effect in TABLE
    for path in fields
]


async def ask(
    source: str, path: str, fields: dict[str, Any], *, model: Any = THINKER, strict: bool = False
) -> tuple[Answer, str]:
    """Return the answer, and what the template was given."""
    client, tokenizer = saying("x"), Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(source, {})
    answer = await post(
        create_app(client, tokenizer, model, strict=strict), path, {"model": model.id, **ROUTES[path], **fields}
    )
    return answer, prompt_of(client).removeprefix("!").removeprefix("hi") if client.submissions else ""


def message_of(answer: Answer, path: str) -> str:
    return str((answer.anthropic_error if path == "/v1/messages" else answer.error)["message"])


@pytest.mark.parametrize(("source", "path", "fields", "name", "told", "has_effect"), ROWS)
async def test_a_route_gives_a_template_what_it_takes_and_names_what_it_does_not(
    source: str, path: str, fields: dict[str, Any], name: str, told: str, has_effect: bool
) -> None:
    answer, given = await ask(source, path, fields)
    assert (answer.status, given, answer.headers.get(HEADER)) == (200, told, None if has_effect else name)
    strict, given = await ask(source, path, fields, strict=True)
    assert (strict.status, given) == ((200, told) if has_effect else (400, ""))
    assert has_effect or message_of(strict, path).startswith(f"{name}: ")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", EFFORTS)
async def test_a_model_that_never_thinks_needs_no_effort_of_none_and_can_do_with_no_other(
    path: str, value: str
) -> None:
    fields, name = effort(value)[path]
    answer, given = await ask(NONE, path, fields, model=PLAINLY)
    assert (answer.status, given, answer.headers.get(HEADER)) == (200, "", None if value == "none" else name)


@pytest.mark.parametrize("source", [NONE, SWITCH, LEVELS, BUDGET])
@pytest.mark.parametrize("asked", [thinking(True), BUDGETED], ids=["thinking", "budget"])
async def test_a_model_that_never_thinks_is_not_told_to(source: str, asked: Any) -> None:
    for path, (fields, name) in asked.items():
        answer, given = await ask(source, path, fields, model=PLAINLY)
        name = name.removesuffix(".budget_tokens")  # the whole of `thinking` is named, and no part of it
        assert (answer.status, given, answer.headers.get(HEADER)) == (200, "", name)


async def test_openrouters_budget_is_the_same_and_one_that_is_none_is_a_hint() -> None:
    chat = "/v1/chat/completions"
    for value, told, ignored in ((9, " thinking_budget=9", None), (-1, "", "reasoning.max_tokens")):
        answer, given = await ask(BUDGET, chat, {"reasoning": {"max_tokens": value}})
        assert (answer.status, given, answer.headers.get(HEADER)) == (200, told, ignored)
    answer, _ = await ask(BUDGET, chat, {"reasoning": {"max_tokens": 9}, "thinking_budget": 8})
    assert (answer.status, answer.error["param"]) == (400, "reasoning.max_tokens")


@pytest.mark.parametrize(
    ("source", "fields", "told", "ignored"),
    [
        (LEVELS, {"reasoning_effort": "high", "enable_thinking": False}, " reasoning_effort=high", "enable_thinking"),
        (SWITCH, {"reasoning_effort": "none", "enable_thinking": False}, " enable_thinking=False", None),
        (SWITCH, {"reasoning_effort": "none", "enable_thinking": True}, " enable_thinking=False", "enable_thinking"),
        (
            BOTH,
            {"reasoning_effort": "low", "enable_thinking": False},
            " reasoning_effort=low enable_thinking=False",
            None,
        ),
        (
            BUDGET,
            {"thinking_budget": 8, "chat_template_kwargs": {"thinking_budget": 7}},
            " thinking_budget=7",
            "thinking_budget",
        ),
        (NONE, {"chat_template_kwargs": {"thinking_budget": 7}}, "", "chat_template_kwargs.thinking_budget"),
    ],
    ids=str,
)
async def test_if_fields_disagree_the_one_without_effect_is_named(
    source: str, fields: dict[str, Any], told: str, ignored: str | None
) -> None:
    answer, given = await ask(source, "/v1/chat/completions", fields)
    assert (answer.status, given, answer.headers.get(HEADER)) == (200, told, ignored)


@pytest.mark.parametrize("name", KEEPING)
async def test_whether_to_keep_thoughts_is_a_hint_for_a_template_that_decides_it(name: str) -> None:
    """Regression: pi asks any server of a Qwen model for `preserve_thinking`, which Qwen3's own template does not have:
    each of its requests was refused."""
    chat, kwargs = "/v1/chat/completions", {"enable_thinking": True, name: True}
    for source, told, ignored in (
        (SWITCH, " enable_thinking=True", f"chat_template_kwargs.{name}"),
        (f"{SWITCH}{{{{ {name} }}}}", " enable_thinking=TrueTrue", None),
    ):
        answer, given = await ask(source, chat, {"chat_template_kwargs": kwargs})
        assert (answer.status, given, answer.headers.get(HEADER)) == (200, told, ignored), answer.json


@pytest.mark.parametrize("value", ["false", "true", "", 0, 1, [], {}], ids=repr)
@pytest.mark.parametrize("name", KEEPING)
async def test_whether_to_keep_thoughts_is_true_or_false(name: str, value: Any) -> None:
    """Regression: templates ask whether it is true, so the text `"false"` kept them."""
    for source in (SWITCH, f"{SWITCH}{{{{ {name} }}}}"):
        answer, _ = await ask(source, "/v1/chat/completions", {"chat_template_kwargs": {name: value}})
        assert (answer.status, answer.error["param"]) == (400, f"chat_template_kwargs.{name}")


async def test_a_prompts_tokens_are_those_of_the_chat_with_that_budget() -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(BUDGET, {})
    body = {**ROUTES["/v1/chat/completions"], "thinking_budget": 9}
    answer = await post(create_app(saying("x"), tokenizer, THINKER), "/tokenize", body)
    assert bytes(answer.json["tokens"]) == b"hi thinking_budget=9"


@pytest.mark.parametrize(
    ("value", "wanted"), [("disabled", False), ("enabled", True), ("adaptive", True), ("auto", True)]
)
@pytest.mark.parametrize(("source", "name"), [(SWITCH, "enable_thinking"), (OTHER_SWITCH, "thinking")])
async def test_the_object_of_deepseek_glm_and_kimi_is_a_switch(
    source: str, name: str, value: str, wanted: bool
) -> None:
    answer, given = await ask(source, "/v1/chat/completions", {"thinking": {"type": value}})
    assert (answer.status, given, answer.headers.get(HEADER)) == (200, f" {name}={wanted}", None)


@pytest.mark.parametrize(
    ("source", "fields", "told", "ignored"),
    [
        (BUDGET, {"thinking": {"type": "enabled", "budget_tokens": 9}}, " thinking_budget=9", None),
        (NONE, {"thinking": {"type": "disabled"}}, "", "thinking.type"),
        (
            SWITCH,
            {"thinking": {"type": "enabled", "clear_thinking": False}},
            " enable_thinking=True",
            "thinking.clear_thinking",
        ),
        (SWITCH, {"thinking": {"type": "enabled", "keep": "all"}}, " enable_thinking=True", "thinking.keep"),
        (SWITCH, {"thinking": {"type": "disabled"}, "enable_thinking": False}, " enable_thinking=False", None),
    ],
    ids=str,
)
async def test_what_else_the_thinking_object_says_is_used_or_named(
    source: str, fields: dict[str, Any], told: str, ignored: str | None
) -> None:
    answer, given = await ask(source, "/v1/chat/completions", fields)
    assert (answer.status, given, answer.headers.get(HEADER)) == (200, told, ignored)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "thinking.type"),
        ({"thinking": {"type": "disabled"}, "reasoning": {"enabled": True}}, "thinking.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_budget": 8}, "thinking.budget_tokens"),
    ],
    ids=str,
)
async def test_the_thinking_object_agrees_with_the_other_fields(fields: dict[str, Any], param: str) -> None:
    answer, _ = await ask(SWITCH, "/v1/chat/completions", fields)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("value", ["false", "true", "", 0, 1, [], {}], ids=repr)
@pytest.mark.parametrize(
    ("source", "name"), [(SWITCH, "enable_thinking"), (OTHER_SWITCH, "thinking"), (NONE, "enable_thinking")]
)
async def test_a_template_gets_no_switch_that_is_neither_on_nor_off(source: str, name: str, value: Any) -> None:
    """Templates compare the switch with `false`: given as text, that switched thoughts on."""
    answer, _ = await ask(source, "/v1/chat/completions", {"chat_template_kwargs": {name: value}})
    assert (answer.status, answer.error["param"]) == (400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("source", [SWITCH, OTHER_SWITCH], ids=["enable_thinking", "thinking"])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
async def test_an_option_of_either_name_is_the_templates_switch(source: str, wanted: bool, name: str) -> None:
    """vLLM's and DeepSeek's clients send `thinking`, Qwen's send `enable_thinking`, and any model may be asked."""
    own = "enable_thinking" if source == SWITCH else "thinking"
    for options in ({name: wanted}, dict.fromkeys(SWITCHES, wanted), dict.fromkeys(SWITCHES) | {name: wanted}):
        answer, given = await ask(source, "/v1/chat/completions", {"chat_template_kwargs": options})
        assert (answer.status, given, HEADER in answer.headers) == (200, f" {own}={wanted}", False)


@pytest.mark.parametrize(("source", "spare"), [(SWITCH, "thinking"), (OTHER_SWITCH, "enable_thinking")])
async def test_of_two_options_that_contradict_each_other_the_templates_own_wins(source: str, spare: str) -> None:
    own = "enable_thinking" if source == SWITCH else "thinking"
    fields = {"chat_template_kwargs": {spare: True, own: False}}
    answer, given = await ask(source, "/v1/chat/completions", fields)
    assert (given, answer.headers[HEADER]) == (f" {own}=False", f"chat_template_kwargs.{spare}")


@pytest.mark.parametrize("name", SWITCHES)
async def test_an_option_without_a_switch_is_a_hint(name: str) -> None:
    answer, given = await ask(NONE, "/v1/chat/completions", {"chat_template_kwargs": {name: False}})
    assert (answer.status, given, answer.headers[HEADER]) == (200, "", f"chat_template_kwargs.{name}")
