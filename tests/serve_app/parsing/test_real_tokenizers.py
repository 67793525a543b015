"""Owns the contract of tags that are tokens: a grammar means the same whatever the tokenizer calls special.
Never walks at random: each answer is checked token by token, as the model's own tokenizer writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.api.text.tokenizer import Tokenizer
from serve_app.grammars import texts
from serve_app.parsing.call_grammar import CallableTool
from serve_app.parsing.call_grammars import CALL_GRAMMARS
from serve_app.parsing.thinking_grammar import after_thoughts, as_content
from serve_app.parsing.tools import TOOL_PARSERS

TAGS = sorted(
    {"<think>", "</think>", "[THINK]", "[/THINK]"} | {tag for parser in TOOL_PARSERS.values() for tag in parser.markers}
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
TOOL = CallableTool("f", SCHEMA, "")
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\né\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "é"}',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "é"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "é"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>é</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>"
    '{"a": "é"}<|tool_call_end|><|tool_calls_section_end|>',
    "phi4_mini_json": '<|tool_call|>[{"name": "f", "arguments": {"a": "é"}}]<|/tool_call|>',
    "openai": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "é"}',
}

LIST = '[TOOL_CALLS][{"name": "f", "arguments": {"a": "é"}}]'
"""What Mistral's models without a special token for `[ARGS]` write."""


@pytest.fixture(params=["special", "added"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, LLTokenizer]:
    """Make a byte-level tokenizer with the tags as special tokens (DeepSeek, Mistral),
    or as added tokens that are text (Qwen)."""
    made = Tokenizer.byte_level()
    add = made._core.add_special_tokens if request.param == "special" else made._core.add_tokens
    add(TAGS)
    made._core.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_dir(tmp_path)
    assert ("<think>" in loaded.special_texts.values()) is (request.param == "special")
    assert "<think>" in loaded.tag_ids
    eos = loaded._core.token_to_id("<eos>")
    return loaded, LLTokenizer(str(tmp_path / "tokenizer.json"), n_vocab=loaded.vocab_size, eos_token=eos)


def admits(tokenizer: tuple[Tokenizer, LLTokenizer], grammar: str, text: str) -> bool:
    """Return whether the grammar admits the text as the model's tokenizer writes it, with each tag as one token."""
    own, theirs = tokenizer
    tokens = own.encode(text)
    assert len(tokens) < len(text.encode())
    matcher = LLMatcher(theirs, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("family", ANSWERS)
def test_a_call_is_admitted_in_the_tokens_that_the_model_writes(
    tokenizer: tuple[Tokenizer, LLTokenizer], family: str
) -> None:
    specials = tokenizer[0].tag_ids
    text = LIST if family == "mistral" and "[ARGS]" not in specials else ANSWERS[family]
    grammar = CALL_GRAMMARS[family]([TOOL], specials, parallel=True)
    for rules in (grammar.calls(), grammar.lazy()):
        assert admits(tokenizer, rules.text(), text)
        assert not admits(tokenizer, rules.text(), re.sub(r"\bf\b(?!])", "g", text))
    before = "Well, é:<|end|><|start|>assistant" if family == "openai" else "Well, é:\n"
    assert admits(tokenizer, grammar.lazy().text(), f"{before}{text}")


def test_thoughts_end_with_their_token(tokenizer: tuple[Tokenizer, LLTokenizer]) -> None:
    specials = tokenizer[0].tag_ids
    grammar = after_thoughts(texts.regex("yes|no"), "qwen3", "<|assistant|>", specials).text()
    assert admits(tokenizer, grammar, "<think>\nhm, é\n</think>\n\nno")
    assert not admits(tokenizer, grammar, "<think>\nhm</think>maybe")


def test_thoughts_of_harmony_and_mistral_end_with_theirs(tokenizer: tuple[Tokenizer, LLTokenizer]) -> None:
    specials = tokenizer[0].tag_ids
    mistral = after_thoughts(texts.regex("yes|no"), "mistral", "[/INST]", specials).text()
    assert admits(tokenizer, mistral, "[THINK]hm, é[/THINK]no")
    answer = as_content(texts.regex("yes|no"), "openai_gptoss", specials)
    harmony = after_thoughts(answer, "openai_gptoss", "<|start|>assistant", specials).text()
    thoughts = "<|channel|>analysis<|message|>hm, é<|end|><|start|>assistant"
    assert admits(tokenizer, harmony, f"{thoughts}<|channel|>final<|message|>no")
    assert not admits(tokenizer, harmony, f"{thoughts}<|channel|>final<|message|>maybe")
