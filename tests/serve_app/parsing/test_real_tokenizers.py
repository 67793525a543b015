"""Owns the contract of tags that are tokens: a grammar means the same whatever the tokenizer calls special.
Never walks: one answer, token by token, as the model's own tokenizer writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve_app.api.tokenizer import Tokenizer
from serve_app.grammars import texts
from serve_app.parsing.call_grammar import CallableTool
from serve_app.parsing.call_grammars import CALL_GRAMMARS
from serve_app.parsing.thinking_grammar import after_thoughts

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
TOOL = CallableTool("f", SCHEMA, "")
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\né\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "é"}',
}

LIST = '[TOOL_CALLS][{"name": "f", "arguments": {"a": "é"}}]'
"""What Mistral's models without a special token for `[ARGS]` write."""


@pytest.fixture(params=["special", "added"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, LLTokenizer]:
    """Byte-level, with the tags as special tokens (DeepSeek, Mistral), or as added ones that are text (Qwen)."""
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
    """As the model's tokenizer writes it: each tag is one token."""
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
        assert not admits(tokenizer, rules.text(), text.replace('f"', 'g"').replace("f[", "g[").replace("f>", "g>"))
    assert admits(tokenizer, grammar.lazy().text(), f"Well, é:\n{text}")


def test_thoughts_end_with_their_token(tokenizer: tuple[Tokenizer, LLTokenizer]) -> None:
    specials = tokenizer[0].tag_ids
    grammar = after_thoughts(texts.regex("yes|no"), "qwen3", "<|assistant|>", specials).text()
    assert admits(tokenizer, grammar, "<think>\nhm, é\n</think>\n\nno")
    assert not admits(tokenizer, grammar, "<think>\nhm</think>maybe")
