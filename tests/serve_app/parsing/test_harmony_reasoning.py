"""Owns the contract of gpt-oss's messages: which are reasoning, which are content, and how much of a header is shown.
Never tests a cut: test_reasoning does, for all parsers."""

from __future__ import annotations

import pytest

from serve_app.parsing.harmony_reasoning import HarmonyReasoningParser
from serve_app.parsing.reasoning import Part, Split
from serve_app.parsing.reasoning_parsers import reasoning_parser

START = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary"
CALL = f"{COMMENTARY} to=functions.f <|constrain|>json<|message|>"


def split(parser: HarmonyReasoningParser, *pieces: str) -> Split:
    found = [*map(parser.push, pieces), parser.flush()]
    return Split("".join(part.reasoning for part in found), "".join(part.content for part in found))


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}Let me see.\n<|end|>{START}{FINAL}\nParis.\n<|return|>", "Let me see.\n", "\nParis.\n"),
        (f"{FINAL}Paris.", "", "Paris."),
        (f"{ANALYSIS}cut off", "cut off", ""),
        (f"{ANALYSIS}cut off<|en", "cut off<|en", ""),
        (f"{ANALYSIS}a<|end|>{START}{ANALYSIS}b<|end|>{START}{FINAL}c", "a\nb", "c"),
        (f"{COMMENTARY}<|message|>I look.<|end|>{START}{FINAL}c", "", "I look.\nc"),
        (f"{ANALYSIS}a<|end|>{START}{CALL}{{}}<|call|>", "a", f"{START}{CALL}{{}}"),
        (f"{CALL}{{}}<|call|>", "", f"{CALL}{{}}"),
        (f" to=functions.f{COMMENTARY} json<|message|>{{}}", "", f" to=functions.f{COMMENTARY} json<|message|>{{}}"),
        (f"{FINAL}a<|end|>{START}{CALL}{{}}", "", f"a{START}{CALL}{{}}"),
        ("<|channel|>analysis to=functions.f<|message|>{}", "", "<|channel|>analysis to=functions.f<|message|>{}"),
        ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}", ""),
        (f"{COMMENTARY} to=python<|message|>1", "", f"{COMMENTARY} to=python<|message|>1"),
        (f"{ANALYSIS}a{START}{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a{FINAL}b", "a", "b"),
        ("Paris, plainly.", "", "Paris, plainly."),
        ("  to Paris", "", "  to Paris"),
        ("<|start|>a <b> c", "", "<|start|>a <b> c"),
        ("a < b <|think|> c", "", "a < b <|think|> c"),
        ("", "", ""),
    ],
)
def test_messages_on_the_channel_analysis_are_reasoning_and_others_content(
    text: str, reasoning: str, content: str
) -> None:
    assert split(HarmonyReasoningParser(), text) == Split(reasoning, content)


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        (START, Split("", "a")),
        (f"{START}{ANALYSIS}I think", Split("a", "")),
        (f"{START}{ANALYSIS}I think<|end|>{START}", Split("", "a")),
        (f"{START}{FINAL}I say", Split("", "a")),
    ],
)
def test_the_prompts_end_tells_in_which_message_an_answer_begins(prompt_end: str, expected: Split) -> None:
    parser = reasoning_parser("openai_gptoss", prompt_end)
    assert parser.inside is bool(expected.reasoning)
    found = [parser.push("a"), parser.flush()]
    assert Split("".join(part.reasoning for part in found), "".join(part.content for part in found)) == expected


def test_text_is_sent_as_soon_as_no_tag_can_follow_from_it() -> None:
    parser = HarmonyReasoningParser()
    pieces = ["<|channel|>", "analysis", "<|message|>", "Let", " me", "<|end|>", START, FINAL, "Pa", "ris <b"]
    sent = [parser.push(piece) for piece in pieces]
    assert [part.reasoning for part in sent] == ["", "", "", "Let", " me", "", "", "", "", ""]
    assert [part.content for part in sent] == ["", "", "", "", "", "", "", "", "Pa", "ris <b"]


def test_the_parts_of_a_split_are_in_the_answers_order_and_tell_where_a_message_begins() -> None:
    parser = HarmonyReasoningParser()
    found = parser.push(f"{ANALYSIS}a<|end|>{START}{FINAL}b<|end|>{START}{ANALYSIS}c")
    assert found == Split("a\nc", "b")
    assert found.parts == (Part(True, "a", True), Part(False, "b", True), Part(True, "c", True, "\n"))
    assert parser.push("d").parts == (Part(True, "d"),)


@pytest.mark.parametrize("kind", [ANALYSIS, FINAL])
def test_text_of_one_message_is_one_part_however_it_was_read(kind: str) -> None:
    """Regression: a token's first letter was a part of its own. Streams of blocks had two events a token."""
    parser = HarmonyReasoningParser()
    parser.push(f"{kind}Let")
    texts = [" me see", "a < b <c>", "\n<"]
    assert [parser.push(text).parts for text in texts] == [
        (Part(kind == ANALYSIS, text),) for text in (" me see", "a < b <c>", "\n")
    ]
    assert parser.flush().parts == (Part(kind == ANALYSIS, "<"),)
