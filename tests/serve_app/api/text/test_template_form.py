"""Owns the form in which templates get thoughts, calls and tools: the template's text shows it, or a trial does.
Never uses a model's own template."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.text.chat_template import ChatTemplate

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"é": [1]}}}
ASKED: dict[str, Any] = {"role": "user", "content": "hi"}
BY_FIELD = (
    "{% for m in messages %}{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception(0) }}{% endif %}"
    "{{ m.role }}:{{ m.thinking }}|{{ m.content }};{% endfor %}"
)
AS_TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'f' + c.function.arguments }}{% endfor %}{% endfor %}"
)
BY_BLOCK = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b['type'] == 'thinking' %}({{ b['thinking'] }}){% else %}{{ b['text'] }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}"
)


def said(**fields: Any) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": ""} | fields]


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (BY_FIELD, {"reasoning_content": "hm", "tool_calls": [CALL]}, "user:|hi;assistant:hm|;"),
        (BY_FIELD, {"content": "a", "tool_calls": [CALL]}, "user:|hi;assistant:|a;"),
        (BY_FIELD, {"content": "a", "reasoning_content": "hm", "tool_calls": [CALL]}, "user:|hi;assistant:hm\na|;"),
        (BY_FIELD, {"content": "a", "reasoning_content": "hm"}, "user:|hi;assistant:hm|a;"),
        (AS_TEXT, {"tool_calls": [CALL]}, 'f{"é": [1]}'),
        (AS_TEXT.replace("'f' +", ""), {"tool_calls": [CALL]}, '{"é": [1]}'),
        (AS_TEXT.replace("arguments", "arguments | tojson"), {"tool_calls": [CALL]}, 'f{"é": [1]}'),
        (BY_BLOCK, {"content": "a", "reasoning_content": "hm"}, "hi;(hm)a;"),
        (BY_BLOCK, {"reasoning_content": "hm", "tool_calls": [CALL]}, "hi;(hm);"),
        (BY_BLOCK, {"content": "a"}, "hi;a;"),
        (
            "{% for m in messages %}{{ m.reasoning_content or m.thinking }}{% endfor %}",
            {"reasoning_content": "hm"},
            "hm",
        ),
    ],
)
def test_a_template_gets_what_it_reads(template: str, fields: dict[str, Any], expected: str) -> None:
    assert ChatTemplate(template, {}).render(said(**fields)) == expected


def test_ids_that_a_template_refuses_are_shortened_and_calls_and_results_stay_together() -> None:
    template = ChatTemplate(
        "{% for m in messages %}"
        "{% for id in ([m.tool_call_id] if m.tool_call_id else m.tool_calls | map(attribute='id')) %}"
        "{% if id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}{{ id }};{% endfor %}{% endfor %}",
        {},
    )
    calls = [CALL | {"id": "call_0123456789abcdef"}, CALL | {"id": "a1B2c3D4e"}]
    results = [{"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls]
    first, second, *again = template.render([*said(tool_calls=calls), *results]).split(";")
    assert (second, again[:2]) == ("a1B2c3D4e", [first, second])
    assert first.isalnum()


def test_the_messages_of_a_request_are_not_changed() -> None:
    messages = said(content="a", reasoning_content="hm", tool_calls=[CALL])
    before = [dict(message) for message in messages]
    for template in (BY_FIELD, AS_TEXT, BY_BLOCK):
        ChatTemplate(template, {}).render(messages)
    assert messages == before
    assert CALL["function"] == {"name": "f", "arguments": {"é": [1]}}


def test_an_answer_with_thoughts_can_be_continued_where_they_are_a_part_of_the_content() -> None:
    template = ChatTemplate(BY_BLOCK, {})
    assert template.render(said(content="a ", reasoning_content="hm"), continue_final_message=True) == "hi;(hm)a "


def test_tools_go_by_the_name_that_the_template_has_for_them() -> None:
    template = ChatTemplate("{{ xml_tools }}{{ python_tools }}", {})
    assert "tools" in template.variables
    assert template.render([ASKED], tools=[{"name": "f"}]) == "[{'name': 'f'}]"
    assert template.render([ASKED], xml_tools="mine") == "mine"
    both = ChatTemplate("{{ xml_tools }}{{ tools | length }}", {})
    assert both.render([ASKED], tools=[{}]) == "1"


def test_a_template_that_takes_no_calls_at_all_is_left_as_it_is() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{{ raise_exception('no') if m.tool_calls }}{% endfor %}", {}
    )
    assert template.render([ASKED]) == "hi"
