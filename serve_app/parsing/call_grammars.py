"""Owns the table of the grammars of calls, by the names of the parsers that read them back.
Never writes a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.parsing.call_grammar import CallGrammar
from serve_app.parsing.harmony_grammar import HarmonyCallGrammar
from serve_app.parsing.json_call_grammars import (
    HermesCallGrammar,
    Llama3JsonCallGrammar,
    MistralCallGrammar,
    Phi4MiniCallGrammar,
)
from serve_app.parsing.pythonic_grammar import PythonicCallGrammar
from serve_app.parsing.section_grammars import DeepSeekV3CallGrammar, DeepSeekV31CallGrammar, KimiK2CallGrammar
from serve_app.parsing.tagged_value_grammars import Glm45CallGrammar, Qwen3CoderCallGrammar

CALL_GRAMMARS: Mapping[str, type[CallGrammar]] = MappingProxyType(
    {
        "hermes": HermesCallGrammar,
        "qwen3_coder": Qwen3CoderCallGrammar,
        "llama3_json": Llama3JsonCallGrammar,
        "pythonic": PythonicCallGrammar,
        "mistral": MistralCallGrammar,
        "openai": HarmonyCallGrammar,
        "deepseek_v3": DeepSeekV3CallGrammar,
        "deepseek_v31": DeepSeekV31CallGrammar,
        "glm45": Glm45CallGrammar,
        "kimi_k2": KimiK2CallGrammar,
        "phi4_mini_json": Phi4MiniCallGrammar,
    }
)
