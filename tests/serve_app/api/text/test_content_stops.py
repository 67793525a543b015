"""Owns the contract of stop strings beside thoughts and calls: they end the text of an answer, and nothing else.
Never tests how a stop string is found: test_stop_strings does."""

from __future__ import annotations

import json
import random
import tracemalloc
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from serve_app.api.text.content_stops import ContentStops
from serve_app.api.text.stop_strings import StopStrings
from serve_app.engines.engine_client import ServedModel
from serve_app.parsing.reasoning_parsers import REASONING_PARSERS, reasoning_parser
from serve_app.parsing.tools import TOOL_PARSERS
from tests.serve_app.api.anthropic import test_anthropic
from tests.serve_app.api.generation.test_tools import CALL, CALLER, THINKER, whole_and_streamed
from tests.serve_app.api.openai.responses import test_responses

pytestmark = pytest.mark.anyio

CALLED = CALL.replace("Oslo", "Oslo END more")
ARGUMENTS = {"city": "Oslo END more"}


def read(text: str, stops: list[str], reasoning: str = "qwen3", tools: str = "hermes", size: int = 1) -> str:
    """Return what is released, followed by `!` and the stop string if one ended it."""
    search = ContentStops(StopStrings(stops), reasoning_parser(reasoning, ""), TOOL_PARSERS[tools]())
    found = ""
    for at in range(0, len(text), size):
        found += search.push(text[at : at + size])
        if search.matched:
            return f"{found}!{search.matched}"
    found += search.flush()
    return f"{found}!{search.matched}" if search.matched else found


async def test_a_chats_call_is_whole_though_it_has_a_stop_string() -> None:
    message, reason = await whole_and_streamed(CALLED, stop=["END", "Oslo", '"'])
    (call,) = message["tool_calls"]
    assert (json.loads(call["function"]["arguments"]), reason) == (ARGUMENTS, "tool_calls")


async def test_a_call_of_anthropics_and_of_a_response_is_whole_too() -> None:
    message = await test_anthropic.whole_and_streamed(CALLED, tools=test_anthropic.TOOLS, stop_sequences=["END"])
    assert (message["content"][0]["input"], message["stop_reason"]) == (ARGUMENTS, "tool_use")
    response = await test_responses.whole_and_streamed(CALLED, tools=test_responses.TOOLS)  # which has no stop strings
    assert json.loads(response["output"][0]["arguments"]) == ARGUMENTS


async def test_a_stop_string_that_was_thought_ends_nothing() -> None:
    said = "<think>\nI must write END.\n</think>\n\nYes. END No."
    message, reason = await whole_and_streamed(said, THINKER, stop=["END"])
    assert (message["content"], message["reasoning"], reason) == ("Yes. ", "I must write END.", "stop")
    told = await test_anthropic.whole_and_streamed(said, THINKER, stop_sequences=["END"], thinking={"type": "adaptive"})
    assert [block["type"] for block in told["content"]] == ["thinking", "text"]
    assert (told["content"][1]["text"], told["stop_sequence"]) == ("Yes. ", "END")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("a\n\nb", ["\n\n"], "a!\n\n"),
        ("\n\nb", ["\n\n"], "!\n\n"),
        ("<think>a\n\nb</think>\n\nc\n\nd", ["\n\n"], "<think>a\n\nb</think>\n\nc!\n\n"),
        (f"EN{CALL}D END", ["END"], f"EN{CALL}D !END"),
        (f"a{CALL}\nEND", ["END"], f"a{CALL}\n!END"),
        ("a <tool b", ["tool"], "a <!tool"),
        ("a <tool_call>\n{no call END", ["END"], "a <tool_call>\n{no call !END"),
        ("a <tool", ["<tool"], "a !<tool"),
        ("a <think>END", ["END"], "a <think>!END"),
        ("<think>a <tool_call> END", ["END"], "<think>a <tool_call> END"),
        (f"<think>a</think>{CALLED}", ["END", "</", "tool_call", "think"], f"<think>a</think>{CALLED}"),
        ("<thin END", ["END"], "<thin !END"),
        ("a EN", ["END"], "a EN"),
    ],
)
def test_what_is_content_is_searched_however_it_was_cut(text: str, stops: list[str], expected: str) -> None:
    for size in (1, 2, 5, len(text)):
        assert read(text, stops, size=size) == expected


def test_thoughts_that_a_call_ends_are_followed_by_it() -> None:
    call = "<tool_call>\n<function=f>\n<parameter=city>\nOslo END\n</parameter>\n</function>\n</tool_call>"
    assert read(f"<think>a{call}", ["END"], tools="qwen3_coder") == f"<think>a{call}"
    assert read(f"<think>a{call} END", ["END"], tools="qwen3_coder").endswith("</tool_call> !END")


@pytest.mark.parametrize(
    ("tools", "head"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value>"),
    ],
)
def test_text_between_a_calls_parameters_is_searched(tools: str, head: str) -> None:
    for size in (1, 5, 100):
        assert read(f"{head}I think. END and more", ["END"], tools=tools, size=size) == f"{head}I think. !END"


def test_harmonys_messages_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>END<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        '<|message|>{"a": "END"}<|call|><|start|>assistant<|channel|>final<|message|>Yes END no'
    )
    expected = text.removesuffix("END no") + "!END"
    assert read(text, ["END"], "openai_gptoss", "openai") == expected


@pytest.mark.parametrize(
    ("text", "stop", "released"),
    [
        ("cout << x", "<<", "cout "),
        ("a<<b", "a<", ""),
        ("a<<b", "<b", "a<"),
        ("a<|e<z", "<|e", "a"),
        ("a<<|end|>b", "<", "a"),
    ],
)
def test_the_beginning_of_a_tag_of_harmony_is_searched_though_another_may_follow(
    text: str, stop: str, released: str
) -> None:
    """The second `<` was taken for the first one, which was lost for the search."""
    head = "<|channel|>final<|message|>"
    for size in (1, 2, 5, 100):
        assert read(f"{head}{text}", [stop], "openai_gptoss", "openai", size=size) == f"{head}{released}!{stop}"


def test_text_after_a_call_of_harmony_that_was_broken_off_is_searched() -> None:
    call, final = '<|channel|>commentary to=functions.f<|message|>{"a": "END<|end|>', "<|channel|>final<|message|>"
    text = f"{call}<|start|>assistant{final}Yes "
    assert read(f"{text}END no", ["END"], "openai_gptoss", "openai") == f"{text}!END"


async def test_a_call_that_an_answer_in_json_quotes_is_searched_as_its_text_is() -> None:
    """Regression: the reader took it for text, and the search for a call."""
    said = '{"a": "<function=weather><parameter=city>x END y"}'
    coder = replace(CALLER, tool_parser="qwen3_coder")
    asked = {"stop": ["END"], "response_format": {"type": "json_object"}}
    message, reason = await whole_and_streamed(said, coder, **asked)
    assert (message["content"], reason) == ('{"a": "<function=weather><parameter=city>x ', "stop")
    call = "\n<function=weather>\n<parameter=city>\nOslo END\n</parameter>\n</function>"
    message, reason = await whole_and_streamed(call, coder, **asked)
    assert (json.loads(message["tool_calls"][0]["function"]["arguments"]), reason) == (
        {"city": "Oslo END"},
        "tool_calls",
    )


def test_text_that_is_skipped_is_read_and_not_searched() -> None:
    search = ContentStops(StopStrings(["END"]), reasoning_parser("qwen3", ""), TOOL_PARSERS["hermes"]())
    assert search.skip("<think>a</think>END ") == "<think>a</think>END "
    assert (search.push("b END"), search.matched) == ("b ", "END")


@pytest.mark.parametrize(("reasoning", "tools"), [(None, "hermes"), ("qwen3", None), ("qwen3", "hermes")])
def test_a_stop_string_ends_an_answer_only_where_its_last_character_came_after_the_skipped_text(
    reasoning: str | None, tools: str | None
) -> None:
    """Regression: a character that a parser held back during the skipped text was searched when it was released."""
    letters, stops = "<ta\n", ("<", "t", "<t", "a<", "\n", "a\n<")
    for text, stop, num_skipped in product(map("".join, product(letters, repeat=3)), stops, range(4)):
        search = ContentStops(
            StopStrings([stop]),
            None if reasoning is None else reasoning_parser(reasoning, ""),
            None if tools is None else TOOL_PARSERS[tools](),
        )
        found = search.skip(text[:num_skipped]) + search.push(text[num_skipped:])
        found += "" if search.matched else search.flush()
        ends = [end for end in range(num_skipped + 1, len(text) + 1) if text[:end].endswith(stop)]
        assert found == (text[: ends[0] - len(stop)] if ends else text), (text, stop, num_skipped)


@pytest.mark.parametrize(("said", "model"), [("x<b", CALLER), ("<b x", THINKER)])
async def test_a_stop_string_that_is_complete_before_min_tokens_ends_no_answer_with_calls_or_thoughts(
    said: str, model: ServedModel
) -> None:
    message, _ = await whole_and_streamed(said, model, stop=["<"], min_tokens=said.index("<") + 2)
    assert message["content"] == said


@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("reasoning", sorted(REASONING_PARSERS))
def test_nothing_is_lost_or_changed_where_no_stop_string_is(reasoning: str, tools: str) -> None:
    draw = random.Random(f"{reasoning} {tools}")
    parts: list[Any] = [
        *TOOL_PARSERS[tools].markers,
        *REASONING_PARSERS[reasoning].markers,
        *("<tool_call>", '{"name": "f", "arguments": {"a": "b"}}', "</tool_call>", "[f(a=1)]", "functools[", "]"),
        *("a", " ", "\n", "<", "{", '"', "to=functions.f"),
    ]
    for _ in range(60):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 12)))
        assert read(text, ["\0"], reasoning, tools, size=draw.randrange(1, 9)) == text


@pytest.mark.parametrize(("tools", "head"), [("llama3_json", '{"parameters": {"a": "'), ("hermes", "<tool_call>")])
def test_characters_that_wait_are_not_copied_at_every_further_one(tools: str, head: str) -> None:
    """The text that waited was copied twice for each character, on the event loop."""
    search = ContentStops(StopStrings(["END"]), reasoning_parser("qwen3", ""), TOOL_PARSERS[tools]())
    size, num_bytes = 4000, 0
    search.push(head + " " * size)
    tracemalloc.start()
    try:
        for _ in range(size):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            assert search.push(" ") == ""
            num_bytes += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert num_bytes < size * 2000, "allocated in all; each copy would be of 4,000 characters or more"
    assert search.flush() == head + " " * 2 * size
