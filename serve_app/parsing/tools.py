"""Owns the table of tool parsers, by their names in vLLM's `--tool-call-parser`, and suggests one for a chat template.
Never parses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.parsing.call_sections import DeepSeekToolParser, KimiK2ToolParser
from serve_app.parsing.glm45 import Glm45ToolParser
from serve_app.parsing.harmony_calls import HarmonyToolParser
from serve_app.parsing.hermes import HermesToolParser
from serve_app.parsing.llama3_json import Llama3JsonToolParser
from serve_app.parsing.mistral import MistralToolParser
from serve_app.parsing.phi4_mini import Phi4MiniToolParser
from serve_app.parsing.pythonic import PythonicToolParser
from serve_app.parsing.qwen3_coder import Qwen3CoderToolParser
from serve_app.parsing.template_signs import Suggestion, first_sign
from serve_app.parsing.tool_parser import ToolParser

TOOL_PARSERS: Mapping[str, type[ToolParser]] = MappingProxyType(
    {
        "hermes": HermesToolParser,
        "qwen3_coder": Qwen3CoderToolParser,
        "llama3_json": Llama3JsonToolParser,
        "pythonic": PythonicToolParser,
        "mistral": MistralToolParser,
        "openai": HarmonyToolParser,
        "deepseek_v3": DeepSeekToolParser,
        "deepseek_v31": DeepSeekToolParser,
        "glm45": Glm45ToolParser,
        "kimi_k2": KimiK2ToolParser,
        "phi4_mini_json": Phi4MiniToolParser,
    }
)

# The texts that a template writes for a call, in the conversation or in its instructions. The first match wins.
_SIGNS = (
    ("openai", ("<|channel|>commentary", "functions.")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ',)),
)


def suggest_tool_parser(chat_template: str) -> Suggestion | None:
    """Suggest the parser for the calls that a chat template shows its model; None if it shows no known form."""
    return first_sign(_SIGNS, chat_template)
