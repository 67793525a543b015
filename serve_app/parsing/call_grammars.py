"""Owns the table of the grammars of calls, by the names of the parsers that read them back.
Never writes a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.parsing.call_grammar import CallGrammar
from serve_app.parsing.json_call_grammars import HermesCallGrammar, Llama3JsonCallGrammar, MistralCallGrammar
from serve_app.parsing.pythonic_grammar import PythonicCallGrammar
from serve_app.parsing.qwen3_coder_grammar import Qwen3CoderCallGrammar

CALL_GRAMMARS: Mapping[str, type[CallGrammar]] = MappingProxyType(
    {
        "hermes": HermesCallGrammar,
        "qwen3_coder": Qwen3CoderCallGrammar,
        "llama3_json": Llama3JsonCallGrammar,
        "pythonic": PythonicCallGrammar,
        "mistral": MistralCallGrammar,
    }
)
