"""Builds the grammars of calls in sections: deepseek_v3, deepseek_v31 and kimi_k2.
Never allows text after a section, because the models' turns end there."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from serve_app.grammars.notation import GrammarRefused
from serve_app.parsing.call_grammar import CallableTool, TaggedCallGrammar, arguments_rule
from serve_app.parsing.call_sections import DeepSeekToolParser, KimiK2ToolParser, SectionToolParser


class _SectionCallGrammar(TaggedCallGrammar):
    """A lazy grammar also allows calls without a section, because the parsers read them."""

    _parser: ClassVar[type[SectionToolParser]]
    _between: ClassVar[str] = ""
    _goes_on: ClassVar[bool] = False

    @abstractmethod
    def _call(self, tool: CallableTool) -> tuple[str, str]:
        """Return a rule for what stands between the call's tag and its arguments, and the text after the arguments."""

    def _all(self) -> str:
        return f"{self._literal(self._parser.section[0])} rest_0"

    def _rules(self) -> str:
        (_, end), (call, call_end) = self._parser.section, self._parser.call
        more = f" ({self._literal(self._between + call)} call)*" if self._parallel else ""
        calls = []
        for tool in self._tools:
            head, tail = self._call(tool)
            calls.append(f"{head} {arguments_rule(tool, self._shared)} {self._literal(tail + call_end)}")
        return (
            f"rest_0: {self._literal(call)} rest_1 {self._literal(end)}\n"
            f"rest_1: call{more}\ncall: {' | '.join(calls)}\n"
        )


class DeepSeekV3CallGrammar(_SectionCallGrammar):
    _parser: ClassVar[type[SectionToolParser]] = DeepSeekToolParser
    _tags: ClassVar[tuple[str, ...]] = (DeepSeekToolParser.section[0], DeepSeekToolParser.call[0])
    _between: ClassVar[str] = "\n"

    def _call(self, tool: CallableTool) -> tuple[str, str]:
        return self._literal(f"function{DeepSeekToolParser.separator}{tool.name}\n```json\n"), "\n```"


class DeepSeekV31CallGrammar(_SectionCallGrammar):
    _parser: ClassVar[type[SectionToolParser]] = DeepSeekToolParser
    _tags: ClassVar[tuple[str, ...]] = (DeepSeekToolParser.section[0], DeepSeekToolParser.call[0])

    def _call(self, tool: CallableTool) -> tuple[str, str]:
        return self._literal(f"{tool.name}{DeepSeekToolParser.separator}"), ""


class KimiK2CallGrammar(_SectionCallGrammar):
    """The number in a call's id counts the conversation's calls; the grammar leaves it to the model."""

    _parser: ClassVar[type[SectionToolParser]] = KimiK2ToolParser
    _tags: ClassVar[tuple[str, ...]] = (KimiK2ToolParser.section[0], KimiK2ToolParser.call[0])

    def _call(self, tool: CallableTool) -> tuple[str, str]:
        if ":" in tool.name:
            raise GrammarRefused(
                f"{tool.name[:64]!r} cannot be a function's name in this model's ids of calls", tool.place
            )
        head = f"{self._literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {self._literal(KimiK2ToolParser.arguments)}"
        return head, ""
