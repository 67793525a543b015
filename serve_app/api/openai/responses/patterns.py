"""Owns the constraints on a request's free-form tools, and the limit on all of their grammars together.
Never reads a grammar itself."""

from __future__ import annotations

from serve_app.api.generation.field_grammars import refused
from serve_app.api.openai.responses.tools import CustomTool, GrammarFormat
from serve_app.grammars.tool_texts import ToolText, lark_text, regex_text

MAX_CHARS = 192 * 2**10
"""Limits a request's definitions and what they become, because each takes time to read and to compile."""


class Patterns:
    """Holds the constraints of one request."""

    def __init__(self) -> None:
        self._num_chars = 0

    def tool_text(self, tool: CustomTool, field: str) -> ToolText:
        """Return what constrains the tool's text, if anything does.

        Raises:
            ApiError: the request's grammars are too large together.
            GrammarRefused: this one cannot be kept.
        """
        if not isinstance(tool.format, GrammarFormat):
            return ToolText()
        definition = tool.format.definition
        self._count(len(definition), field)
        text = {"lark": lark_text, "regex": regex_text}[tool.format.syntax](definition)
        self._count(text.num_chars, field)
        return text

    def _count(self, num_chars: int, field: str) -> None:
        self._num_chars += num_chars
        if self._num_chars > MAX_CHARS:
            text = f"should have at most {MAX_CHARS} characters together with the grammars of the tools before it"
            raise refused(field, f"{text}, as definitions and as what they become, but they have {self._num_chars}")
