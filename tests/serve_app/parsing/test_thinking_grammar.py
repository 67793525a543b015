"""Owns the contract of thoughts before a constrained answer: they are free, but what the parser calls content is not.
Never tests the answer's grammar."""

from __future__ import annotations

import pytest

from serve_app.grammars import texts
from serve_app.grammars.notation import Grammar
from serve_app.parsing.call_grammar import CallableTool
from serve_app.parsing.call_grammars import CALL_GRAMMARS
from serve_app.parsing.harmony import TAGS as HARMONY_TAGS
from serve_app.parsing.reasoning_parsers import REASONING_PARSERS, reasoning_parser
from serve_app.parsing.thinking_grammar import after_thoughts, as_content
from tests.support.grammar_walks import Walker

YES = texts.regex("yes|no")
TAGS = ("<think>", "</think>", "<tool_call>", *HARMONY_TAGS, "[THINK]", "[/THINK]")
WALKERS = {"text": Walker(), "special": Walker(TAGS), "begin": Walker(TAGS[:1]), "end": Walker(TAGS[1:2])}
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
PROMPTS = ["<|assistant|>", "<|assistant|><think>\n", "<|assistant|><think>\n\n</think>\n\n", f"{NEXT}{ANALYSIS}So"]
ENDS = dict(zip(["unopened", "open", "closed", "analysis"], PROMPTS, strict=True))


def content_of(parser: str, prompt_end: str, text: str) -> str:
    reader = reasoning_parser(parser, prompt_end)
    return reader.push(text).content + reader.flush().content


@pytest.mark.parametrize("kind", WALKERS)
@pytest.mark.parametrize("prompt", ENDS)
@pytest.mark.parametrize("parser", REASONING_PARSERS)
def test_what_the_reader_calls_content_is_what_the_grammar_says(parser: str, prompt: str, kind: str) -> None:
    walker = WALKERS[kind]
    answer = as_content(YES, parser, walker.specials)
    grammar = after_thoughts(answer, parser, ENDS[prompt], walker.specials).text()
    for seed in range(15):
        text = walker.walk(grammar, (parser, prompt, kind, seed))
        assert content_of(parser, ENDS[prompt], text) in ("yes", "no"), text


@pytest.mark.parametrize("kind", WALKERS)
@pytest.mark.parametrize(
    ("parser", "prompt", "text", "is_admitted"),
    [
        ("qwen3", "unopened", "yes", True),
        ("qwen3", "unopened", "<think>\nmaybe? no: {}\n</think>\n\nyes", True),
        ("qwen3", "unopened", "<think>\nyes", False),
        ("qwen3", "unopened", "maybe</think>yes", False),
        ("qwen3", "open", "maybe?\n</think>\n\nno", True),
        ("qwen3", "open", "maybe?\n</think>\n\nperhaps", False),
        ("qwen3", "open", "yes", False),
        ("qwen3", "closed", "yes", True),
        ("qwen3", "closed", "<think>a</think>yes", False),
        ("deepseek_r1", "unopened", "maybe</think>yes", True),
        ("deepseek_r1", "unopened", "<think>\nmaybe</think>yes", True),
        ("deepseek_r1", "unopened", "yes", False),
        ("deepseek_r1", "closed", "yes", True),
        ("mistral", "unopened", "[THINK]maybe[/THINK]yes", True),
        ("mistral", "unopened", "[THINK]yes", False),
        ("kimi_k2", "unopened", "<think>maybe</think>yes", True),
        ("kimi_k2", "open", "a <|tool_calls_section_begin|><|tool_call_begin|></think>yes", False),
        ("openai_gptoss", "unopened", "<|channel|>final<|message|>yes", True),
        ("openai_gptoss", "unopened", f"{ANALYSIS}hm{NEXT}<|channel|>final<|message|>yes", True),
        ("openai_gptoss", "unopened", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}<|channel|>final<|message|>yes", True),
        ("openai_gptoss", "unopened", f"{ANALYSIS}yes", False),
        ("openai_gptoss", "unopened", f"{ANALYSIS}hm{NEXT}<|channel|>final<|message|>perhaps", False),
        ("openai_gptoss", "unopened", f"{ANALYSIS}hm{NEXT}yes", False),
        ("openai_gptoss", "analysis", f"hm{NEXT}<|channel|>final<|message|>yes", True),
    ],
)
def test_the_answer_begins_after_the_end_tag(parser: str, prompt: str, text: str, is_admitted: bool, kind: str) -> None:
    walker = WALKERS[kind]
    grammar = after_thoughts(as_content(YES, parser, walker.specials), parser, ENDS[prompt], walker.specials).text()
    assert walker.admits(grammar, text) is is_admitted


def test_a_call_inside_the_thoughts_cannot_end_them_where_the_parser_would_let_it() -> None:
    walker, call = WALKERS["text"], "<tool_call>\n<function="
    assert not walker.begins(after_thoughts(YES, "qwen3", ENDS["open"], {}).text(), f"hm {call}")
    assert walker.begins(after_thoughts(YES, "deepseek_r1", ENDS["open"], {}).text(), f"hm {call}")


@pytest.mark.parametrize("kind", ["text", "special"])
def test_a_lazy_answer_is_constrained_after_the_thoughts_and_not_in_them(kind: str) -> None:
    walker = WALKERS[kind]
    tool = CallableTool("f", {"type": "object", "properties": {}, "additionalProperties": False}, "")
    lazy: Grammar = CALL_GRAMMARS["hermes"]([tool], walker.specials, parallel=True).lazy()
    grammar = after_thoughts(lazy, "qwen3", ENDS["unopened"], walker.specials).text()
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert walker.admits(grammar, f"<think>\nhm\n</think>\n\n{call}")
    assert walker.admits(grammar, f"Well. {call}")
    assert not walker.admits(grammar, f"<think>\nhm\n</think>\n\n{call.replace('f', 'g')}")
    if kind == "text":  # special tokens are not part of the thoughts' text
        assert walker.admits(grammar, "<think>\na <tool_call> of what?\n</think>\n\nNo.")


@pytest.mark.parametrize("kind", ["text", "special"])
def test_calls_of_harmony_follow_its_thoughts_without_a_message_between(kind: str) -> None:
    walker = WALKERS[kind]
    tool = CallableTool("f", {"type": "object", "properties": {}, "additionalProperties": False}, "")
    calls = CALL_GRAMMARS["openai"]([tool], walker.specials, parallel=True).calls()
    grammar = after_thoughts(calls, "openai_gptoss", ENDS["unopened"], walker.specials).text()
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    assert walker.admits(grammar, call)
    assert walker.admits(grammar, f"{ANALYSIS}hm{NEXT}{call}")
    assert not walker.admits(grammar, f"{ANALYSIS}hm{NEXT}<|channel|>final<|message|>{call}")
    assert not walker.admits(grammar, f"{ANALYSIS}hm{NEXT}{call.replace('{}', '{ }')}")
