"""Owns the contract of reasoning parsers: what is reasoning, what is content,
and that cutting the text changes neither.
Never tests how a parser gets there."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.parsing.reasoning import ReasoningParser, Split
from serve_app.parsing.reasoning_parsers import REASONING_PARSERS, reasoning_parser
from tests.serve_app.parsing.drive import cut

FRAGMENTS = [
    *(
        "<|channel|>",
        "analysis",
        "final",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "assistant",
        " to=functions.f",
        "[THINK]",
    ),
    *("[/THINK]", "[", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    *("<think>", "</think>", "<th", "</", "<", "\n", " ", "a", "é", ">", "<tool_call>", "<function="),
]
messy_texts = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join)
places = st.lists(st.integers(0, 100), max_size=10)


def split(parser: ReasoningParser, *pieces: str) -> Split:
    found = [*map(parser.push, pieces), parser.flush()]
    return Split("".join(part.reasoning for part in found), "".join(part.content for part in found))


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n\nYes.\n</think>\n\nParis.\n", "Let me see.\n\nYes.", "Paris.\n"),
        ("\n <think>a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\nParis", "", "Paris"),
        ("<think></think>", "", ""),
        ("<think> a </think> b", " a ", " b"),
        ("<think>a < b </thin> <think>", "a < b </thin> <think>", ""),
        ("<think>a<</think>b</think>c<think>d</think>", "a<", "b</think>c<think>d</think>"),
        ("<think>\ncut off\n", "cut off\n", ""),
        ("<think>cut off</thi", "cut off</thi", ""),
        ("<think>a\n\n<tool_call>\n<function=f>\n</think>", "a", "<tool_call>\n<function=f>\n</think>"),
        ("<think>a <tool_call> \n</think>b", "a <tool_call> ", "b"),
        ("<think><tool_call><tool_call><function=", "<tool_call>", "<tool_call><function="),
        ("<think>a <tool_call>\n<fun", "a <tool_call>\n<fun", ""),
        ("\n\nParis <think>a</think>", "", "\n\nParis <think>a</think>"),
        ("Paris</think>", "", "Paris</think>"),
        ("<think", "", "<think"),
        ("<<think>", "", "<<think>"),
        (" \n", "", " \n"),
        ("", "", ""),
    ],
)
def test_qwen3_reasons_in_a_block_at_the_beginning_or_not_at_all(text: str, reasoning: str, content: str) -> None:
    assert split(REASONING_PARSERS["qwen3"](), text) == Split(reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Okay.\n</think>\n\nParis", "Okay.", "Paris"),
        ("\nOkay. <think>\n</think>Paris", "Okay. <think>", "Paris"),
        ("<think>\nOkay.\n</think>\n\nParis", "Okay.", "Paris"),
        ("\n\n</think>\n\nParis", "", "Paris"),
        ("</think>", "", ""),
        ("never closed\n\n", "never closed\n\n", ""),
        ("\n\n<thin", "<thin", ""),
        ("  a", "  a", ""),
    ],
)
def test_a_block_that_the_prompt_opened_needs_no_begin_tag(text: str, reasoning: str, content: str) -> None:
    assert split(REASONING_PARSERS["deepseek_r1"](), text) == Split(reasoning, content)
    assert split(REASONING_PARSERS["qwen3"](opened=True), text) == Split(reasoning, content)


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_an_answer_whose_tags_were_not_decoded_is_another_one(name: str) -> None:
    markers = REASONING_PARSERS[name].markers
    texts = [
        *("<think>a</think>b<think>", "[THINK]a[/THINK]b[THINK]"),
        "<think>a<|tool_calls_section_begin|><|tool_call_begin|>",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>c",
        "<|channel|>analysis<|message|>a<|end|>b",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>a",
    ]
    for marker in markers:
        assert any(
            split(REASONING_PARSERS[name](), text.replace(marker, "")) != split(REASONING_PARSERS[name](), text)
            for text in texts
        ), marker


def test_a_block_of_deepseek_ends_with_its_tag_only() -> None:
    text = "a <tool_call>\n<function=f>"
    assert split(REASONING_PARSERS["deepseek_r1"](), text) == Split(text, "")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "kimi_k2"])
def test_with_thinking_turned_off_all_text_is_content_character_for_character(name: str) -> None:
    text = "\n<think>a</think>\n\nb"
    assert split(REASONING_PARSERS[name](opened=True, enabled=False), text) == Split("", text)


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
@pytest.mark.parametrize("opened", [False, True])
@settings(deadline=None)
@given(text=messy_texts | st.text(), at=places)
def test_no_way_of_cutting_an_answer_changes_it(name: str, opened: bool, text: str, at: list[int]) -> None:
    new = REASONING_PARSERS[name]
    assert split(new(opened=opened), *cut(text, at)) == split(new(opened=opened), text)
    assert split(new(opened=opened), *text) == split(new(opened=opened), text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("[THINK]Let me see.\n[/THINK]Paris.", "Let me see.", "Paris."),
        ("[THINK]a [1] <think> [/THINK", "a [1] <think> [/THINK", ""),
        ("Paris [THINK]a[/THINK]", "", "Paris [THINK]a[/THINK]"),
    ],
)
def test_mistral_has_tags_of_its_own(text: str, reasoning: str, content: str) -> None:
    assert split(REASONING_PARSERS["mistral"](), text) == Split(reasoning, content)


def test_a_section_of_calls_ends_the_block_that_kimi_leaves_open() -> None:
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    assert split(REASONING_PARSERS["kimi_k2"](), f"<think>a{call}") == Split("a", call)
    assert split(REASONING_PARSERS["kimi_k2"](), "<think>a<|tool_calls_section_begin|>b</think>c") == Split(
        "a<|tool_calls_section_begin|>b", "c"
    )


@given(messy_texts)
def test_text_that_does_not_begin_with_the_tag_comes_back_character_for_character(text: str) -> None:
    if not text.lstrip().startswith("<think>"):
        assert split(REASONING_PARSERS["qwen3"](), text) == Split("", text)


def test_text_is_sent_as_soon_as_no_tag_can_follow_from_it() -> None:
    parser = REASONING_PARSERS["qwen3"]()
    pieces = ["<thi", "nk>\n", "Let", " me\n", "see</", "b></th", "ink>\n", "\nPa", "ris\n"]
    sent = [parser.push(piece) for piece in pieces]
    assert [part.reasoning for part in sent] == ["", "", "Let", " me", "\nsee", "</b>", "", "", ""]
    assert [part.content for part in sent] == ["", "", "", "", "", "", "", "Pa", "ris\n"]


def test_a_parser_says_whether_the_text_that_comes_next_is_reasoning() -> None:
    parser = REASONING_PARSERS["qwen3"]()
    seen = []
    for piece in ["\n", "<think>", "a", "</think>", "b"]:
        parser.push(piece)
        seen.append(parser.inside)
    assert seen == [False, True, True, False, False]
    assert REASONING_PARSERS["deepseek_r1"]().inside
    assert not REASONING_PARSERS["deepseek_r1"](enabled=False).inside


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("<|im_start|>assistant\n", Split("", "a</think>b")),
        ("<|im_start|>assistant\n<think>\n", Split("a", "b")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Split("", "a</think>b")),
    ],
)
def test_the_prompts_end_tells_whether_the_block_is_open_or_over(prompt_end: str, expected: Split) -> None:
    assert split(reasoning_parser("qwen3", prompt_end), "a</think>b") == expected


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "kimi_k2"])
@pytest.mark.parametrize(
    ("continued", "expected"),
    [
        ("Well,", Split("", "a</think>b")),
        ("<think>\nHm.\n</think>\n\nWell,", Split("", "a</think>b")),
        ("<think>\nHm.", Split("a", "b")),
        ("</think><think>", Split("a", "b")),
    ],
)
def test_an_answer_that_continues_a_text_is_reasoning_if_the_text_has_left_the_block_open(
    name: str, continued: str, expected: Split
) -> None:
    """For DeepSeek's models, whose prompt opens the block, all of it was."""
    assert split(reasoning_parser(name, continued[-5:], continued), "a</think>b") == expected


def test_work_grows_with_the_text_and_not_with_its_square() -> None:
    def work(times: int) -> int:
        counted = [0]

        def count(frame: object, event: str, argument: object) -> None:
            counted[0] += event in ("call", "c_call")

        parser = REASONING_PARSERS["deepseek_r1"]()
        sys.setprofile(count)
        try:
            for character in "a\n\n</thin" * times:
                parser.push(character)
        finally:
            sys.setprofile(None)
        return counted[0]

    assert work(400) < 2.2 * work(200)
