"""Owns the table of reasoning parsers, by their names in vLLM's `--reasoning-parser`, and suggests one for a chat
template.
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

# The texts that a template writes around thoughts, in past turns or at the beginning of the answer. Whether it opens
# the block need not be known here, because the prompt's end shows it.
_SIGNS = (
    ("openai_gptoss", ("<|channel|>", "analysis", "<|message|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    ("qwen3", ("</think>",)),
    ("qwen3", ("<think>",)),
)


def reasoning_parser(name: str, prompt_end: str, continued: str = "") -> ReasoningParser:
    """Make a parser for the answer to a prompt that ends with `prompt_end`. `continued`: see ReasoningParser.after."""
    return REASONING_PARSERS[name].after(prompt_end, continued)


def suggest_reasoning_parser(chat_template: str) -> Suggestion | None:
    """Suggest the parser for the thoughts that a chat template writes; None if it writes no known form."""
    return first_sign(_SIGNS, chat_template)
