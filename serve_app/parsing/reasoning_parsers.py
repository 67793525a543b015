"""Owns the table of reasoning parsers, by the names that vLLM's `--reasoning-parser` has, and the guess which one fits.
Never parses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.parsing.harmony_reasoning import HarmonyReasoningParser
from serve_app.parsing.reasoning import (
    DeepSeekR1ReasoningParser,
    KimiK2ReasoningParser,
    MistralReasoningParser,
    ReasoningParser,
)
from serve_app.parsing.template_signs import Suggestion, first_sign

REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = MappingProxyType(
    {
        "qwen3": ReasoningParser,
        "deepseek_r1": DeepSeekR1ReasoningParser,
        "kimi_k2": KimiK2ReasoningParser,
        "mistral": MistralReasoningParser,
        "openai_gptoss": HarmonyReasoningParser,
    }
)

# What a template writes of thoughts, for a turn in the past or where the answer begins. Where it opens the block, the
# prompt's end says so: the first parser that takes `<think>` needs no telling.
_SIGNS = (
    ("openai_gptoss", ("<|channel|>", "analysis", "<|message|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
)


def reasoning_parser(name: str, prompt_end: str) -> ReasoningParser:
    """A parser for the answer to a prompt that ends so."""
    return REASONING_PARSERS[name].after(prompt_end)


def suggest_reasoning_parser(chat_template: str) -> Suggestion | None:
    """The parser for the thoughts that a chat template writes; None if it shows none that are known."""
    return first_sign(_SIGNS, chat_template)
