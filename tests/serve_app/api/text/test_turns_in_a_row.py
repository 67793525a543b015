"""Owns the promise that several turns of one role in a row, and words of the user after a tool's result, reach a model
whose template insists on alternation.
Never reads an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.api.ingress import create_app
from serve_app.api.text.chat_template import ChatTemplate, TemplateFailed
from serve_app.api.text.tokenizer import Tokenizer
from tests.serve_app.api.generation.test_tools import CALLER, TOOLS, prompt_of, saying
from tests.serve_app.harness import post

SHIPPED = sorted((Path(__file__).parents[2] / "parsing" / "templates").glob("*.jinja"))
SHOWS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}?{{ m.reasoning_content }}{% endif %}]{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}{% endfor %}"
)
"""The check for alternation in Gemma's templates, and in Mistral's first ones."""
MISTRAL = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('conversation roles must alternate except for tool calls and results') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
)
"""The check in Mistral's later templates."""


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CHANGING = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == ns.last != 'tool' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}{% endfor %}"
)
"""A check that knows results of tools."""


def asked(text: str) -> dict[str, Any]:
    return turn("user", text)


def said(text: str, **fields: Any) -> dict[str, Any]:
    return turn("assistant", text, **fields)


CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = said("", tool_calls=[CALL])
RESULT = turn("tool", "rain", tool_call_id="call00001")
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def shown(messages: list[dict[str, Any]], check: str) -> str:
    return ChatTemplate(check + SHOWS, {}).render(messages)


@pytest.mark.parametrize("check", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([asked("a"), asked("b")], "[user:a\n\nb]"),
        ([asked("a"), asked("b"), asked("c"), said("d"), asked("e")], "[user:a\n\nb\n\nc][assistant:d][user:e]"),
        ([asked("a"), said("b"), said("c"), asked("d")], "[user:a][assistant:b\n\nc][user:d]"),
        (
            [asked("a"), said("b", reasoning_content="B"), said("c", reasoning_content="C"), asked("d")],
            "[user:a][assistant:b\n\nc?B\n\nC][user:d]",
        ),
        ([asked("a"), said("b"), said("c", reasoning_content="C"), asked("d")], "[user:a][assistant:b\n\nc?C][user:d]"),
    ],
    ids=str,
)
def test_turns_in_a_row_become_one_for_a_template_that_insists(check: str, messages: Any, told: str) -> None:
    assert shown(messages, check) == told


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([asked("a"), CALLED, RESULT, asked("b")], "[user:a][assistant:][tool:rain\n\n<user>\nb\n</user>]"),
        (
            [asked("a"), CALLED, RESULT, RESULT, asked("b"), asked("c"), said("d"), asked("e")],
            "[user:a][assistant:][tool:rain][tool:rain\n\n<user>\nb\n\nc\n</user>][assistant:d][user:e]",
        ),
        ([asked("a"), CALLED, RESULT, said("b"), asked("c")], "[user:a][assistant:][tool:rain][assistant:b][user:c]"),
    ],
    ids=str,
)
def test_words_after_a_result_become_a_part_of_it_for_a_template_that_insists(messages: Any, told: str) -> None:
    assert shown(messages, MISTRAL) == told


OTHER_CALL = CALL | {"id": "call00002"}
SHOWS_CALLS = "{% for m in messages %}{{ m.role }}:{{ m.content }}!{{ (m.tool_calls or []) | length }} {% endfor %}"


@pytest.mark.parametrize("check", [CHANGING, MISTRAL], ids=["changing", "mistral"])
@pytest.mark.parametrize(
    ("said_in_a_row", "told"),
    [
        ([said("b"), CALLED], "assistant:b!1"),
        ([said("b"), said("c"), CALLED], "assistant:b\n\nc!1"),
        ([said("b"), CALLED, said("", tool_calls=[OTHER_CALL])], "assistant:b!2"),
    ],
    ids=str,
)
def test_text_and_the_calls_after_it_become_one_turn(check: str, said_in_a_row: Any, told: str) -> None:
    template = ChatTemplate(check + SHOWS_CALLS, {})
    text = template.render([asked("a"), *said_in_a_row, RESULT, said("d")])
    assert text == f"user:a!0 {told} tool:rain!0 assistant:d!0 "


def test_text_after_a_call_that_has_no_result_stays_after_it() -> None:
    messages = [asked("a"), CALLED, said("stopped"), asked("b")]
    assert shown(messages, MISTRAL) == "[user:a][assistant:][assistant:stopped][user:b]"


def test_a_template_that_takes_turns_in_a_row_is_given_them() -> None:
    messages = [asked("a"), asked("b"), said("c"), said("d"), CALLED, RESULT, asked("e")]
    assert shown(messages, "") == "".join(f"[{one['role']}:{one['content']}]" for one in messages)


def test_images_of_turns_in_a_row_stay_in_order() -> None:
    messages = [asked("a"), turn("user", [IMAGE, {"type": "text", "text": "b"}])]
    told = ChatTemplate(GEMMA + "{{ messages | tojson }}", {}).render(messages)
    assert told.index('"a"') < told.index("image_url") < told.index('"b"')


def test_an_image_after_a_result_is_still_the_templates_to_refuse() -> None:
    with pytest.raises(TemplateFailed, match="must alternate"):
        shown([asked("a"), CALLED, RESULT, turn("user", [IMAGE]), asked("b")], MISTRAL)


SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% set messages = messages[1:] %}{% endif %}"
)
"""The beginning of Gemma's and Mistral's templates."""


@pytest.mark.parametrize("check", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([said("a"), asked("b")], "[user:][assistant:a][user:b]"),
        ([turn("system", "s"), said("a"), asked("b")], "<s>[user:][assistant:a][user:b]"),
        ([turn("system", "s"), said("a"), said("b"), asked("c")], "<s>[user:][assistant:a\n\nb][user:c]"),
        ([said("a")], "[user:][assistant:a]"),
        ([turn("system", "s"), asked("a")], "<s>[user:a]"),
    ],
    ids=str,
)
def test_before_an_assistants_greeting_the_user_says_nothing(check: str, messages: Any, told: str) -> None:
    assert shown(messages, SYSTEM_FIRST + check) == told


def test_a_template_that_takes_a_greeting_is_given_it_as_the_first_turn() -> None:
    assert shown([turn("system", "s"), said("a"), asked("b")], "") == "[system:s][assistant:a][user:b]"


def test_a_template_that_takes_no_user_without_words_still_refuses_a_greeting() -> None:
    check = GEMMA + "{% for m in messages if not m.content %}{{ raise_exception('no content') }}{% endfor %}"
    with pytest.raises(TemplateFailed, match="must alternate"):
        shown([said("a"), asked("b")], check)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_template_takes_a_greeting(path: Path) -> None:
    """SillyTavern sends a character's first words like this."""
    template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    text = template.render([said("a-greeting"), asked("an-answer")])
    assert -1 < text.rfind("a-greeting") < text.rfind("an-answer")


def test_what_such_a_template_refuses_besides_is_still_refused() -> None:
    with pytest.raises(TemplateFailed, match="must alternate"):
        shown([RESULT, asked("b")], GEMMA)


def test_continuing_the_last_of_several_turns_continues_its_text() -> None:
    template = ChatTemplate(GEMMA + SHOWS, {})
    messages = [asked("a"), said("b"), said("c")]
    assert template.render(messages, continue_final_message=True) == "[user:a][assistant:b\n\nc"


@pytest.mark.parametrize("check", [GEMMA, MISTRAL], ids=["gemma", "mistral"])
def test_turns_by_the_ten_thousands_become_one_in_one_go(check: str) -> None:
    text = shown([asked("a")] * 100_000, check)
    assert text == "[user:" + "\n\n".join("a" * 100_000) + "]"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("check", ["", MISTRAL], ids=["as-it-is", "alternating"])
def test_every_template_shows_what_agents_send_in_its_order(path: Path, check: str) -> None:
    """`alternating` adds the check of Mistral's published templates, which the shipped ones lack."""
    template = ChatTemplate(check + path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    texts = ["first-words", "second-words", "an-answer", "third-words", "a-result", "fourth-words", "fifth-words"]
    first, second, answer, third, result, fourth, fifth = texts
    messages = [asked(first), asked(second), said(answer), asked(third), CALLED, RESULT | {"content": result}]
    text = template.render([*messages, asked(fourth), asked(fifth)], tools=TOOLS)
    places = [text.rfind(one) for one in texts]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.anyio
async def test_every_route_takes_what_agents_send() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    chat = [asked("a"), asked("b"), turn("assistant", None, tool_calls=[call]), RESULT, asked("c")]
    use = {"type": "tool_use", "id": "call00001", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": "rain"}
    anthropic = [
        asked("a"),
        asked("b"),
        turn("assistant", [use]),
        turn("user", [result, {"type": "text", "text": "c"}]),
    ]
    items = [
        asked("a"),
        asked("b"),
        {"type": "function_call", "call_id": "call00001", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call00001", "output": "rain"},
        asked("c"),
    ]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": chat},
        "/v1/messages": {"messages": anthropic, "max_tokens": 9},
        "/v1/responses": {"input": items},
    }
    await every_route_is_asked(bodies, "[user:a\n\nb][assistant:][tool:rain\n\n<user>\nc\n</user>]")


@pytest.mark.anyio
async def test_every_route_takes_a_greeting() -> None:
    messages = [said("a"), asked("b")]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 9},
        "/v1/responses": {"input": messages},
    }
    await every_route_is_asked(bodies, "[user:][assistant:a][user:b]")


async def every_route_is_asked(bodies: dict[str, dict[str, Any]], told: str) -> None:
    tokenizer = Tokenizer.byte_level()
    tokenizer._chat_template = ChatTemplate(MISTRAL + SHOWS, {})
    for path, body in bodies.items():
        client = saying("x")
        answer = await post(create_app(client, tokenizer, CALLER), path, {"model": CALLER.id, **body})
        assert answer.status == 200, answer.json
        assert prompt_of(client) == told
