"""Owns the table of tool parsers, by the names that vLLM's `--tool-call-parser` has, and the guess which one fits.
Never parses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.parsing.hermes import HermesToolParser
from serve_app.parsing.llama3_json import Llama3JsonToolParser
from serve_app.parsing.mistral import MistralToolParser
from serve_app.parsing.pythonic import PythonicToolParser
from serve_app.parsing.qwen3_coder import Qwen3CoderToolParser
from serve_app.parsing.tool_parser import ToolParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesToolParser,
        "qwen3_coder": Qwen3CoderToolParser,
        "llama3_json": Llama3JsonToolParser,
        "pythonic": PythonicToolParser,
        "mistral": MistralToolParser,
    }
)

# What a template writes of a call, for one in the conversation or in its instructions. The first that fits wins.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ',)),
)


def suggest_tool_parser(chat_template: str) -> str | None:
    """The parser for the calls that a chat template teaches its model to write; None if it shows none that is known."""
    for name, signs in _SIGNS:
        if all(sign in chat_template for sign in signs):
            return name
    return None
