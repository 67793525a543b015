"""Contracts of the results of parallel calls: a prompt shows them in the order of the calls, however they arrive.
Claude Code once sent a picture, which was read faster, before the file that it had been asked for first."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.text.chat_template import ChatTemplate
from serve_app.api.text.result_order import with_results_in_order

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", {})


def calls(*ids: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": {}}
    made = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(call_id: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


ASKED = {"role": "user", "content": "q"}


def test_results_are_shown_in_the_order_of_the_calls() -> None:
    messages = [ASKED, calls("a", "b", "c"), result("c", "3"), result("a", "1"), result("b", "2"), ASKED]
    assert TEMPLATE.render(messages) == "user:q;assistant:;tool:1;tool:2;tool:3;user:q;"


def test_each_run_has_the_calls_before_it() -> None:
    first = [calls("a", "b"), result("b", "2"), result("a", "1")]
    second = [calls("b", "a"), result("a", "1"), result("b", "2")]
    shown = TEMPLATE.render([ASKED, *first, *second])
    assert shown == "user:q;assistant:;tool:1;tool:2;assistant:;tool:2;tool:1;"


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED, calls("a", "b"), result("b", "2"), result("x", "1")],
        [ASKED, calls(None, "b"), result("b", "2"), result(None, "1")],
        [ASKED, calls("a", "a"), result("a", "2"), result("a", "1")],
        [result("b", "2"), result("a", "1"), ASKED],
    ],
    ids=["an id of no call", "calls without ids", "one id twice", "no calls"],
)
def test_what_cannot_be_told_apart_stays_as_it_is(messages: list[dict[str, Any]]) -> None:
    assert list(with_results_in_order(messages)) == messages
