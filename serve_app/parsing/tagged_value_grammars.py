"""Builds the grammars of calls with parameters between tags: qwen3_coder and glm45.
Never writes a value's rules: tagged_value_rules does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from serve_app.grammars.notation import GrammarRefused, Specials, quoted
from serve_app.parsing import glm45
from serve_app.parsing.call_grammar import CallableTool, TaggedCallGrammar
from serve_app.parsing.parameters import Parameter, parameters_of
from serve_app.parsing.tagged_value_rules import ValueRules

_ANY_NAME = r"/[^<>\s][^<>\n]{0,63}/"


class _TaggedValueCallGrammar(TaggedCallGrammar):
    _end: ClassVar[str]
    _frame: ClassVar[str]
    _never: ClassVar[str]
    """A regex of what the parser takes for the end of a value that has no end tag."""

    def __init__(self, tools: Sequence[CallableTool], specials: Specials, *, parallel: bool) -> None:
        super().__init__(tools, specials, parallel=parallel)
        self._values = ValueRules(self._end, self._frame, self._never, specials, self._shared)

    @abstractmethod
    def _head(self, name: str) -> str:
        """Write a rule for a parameter's name and what follows it, given the rule for the name."""

    @abstractmethod
    def _function(self, name: str, parameters: str) -> str:
        """Write a rule for a function from its name on, given the rule for its parameters."""

    def _all(self) -> str:
        return self._repeated(f"{self._literal('<tool_call>')} rest_0", "\n")

    def _functions(self) -> str:
        """Write the rule `function`, and those that it refers to."""
        names = " | ".join(f"function_{number}" for number in range(len(self._tools)))
        free = f"free: {self._head(_ANY_NAME)} {self._values.text()} {self._after_value()}\n"
        functions = "".join(self._rules_of(number, tool) for number, tool in enumerate(self._tools))
        return f"function: {names}\n{free}{functions}"

    def _rules_of(self, number: int, tool: CallableTool) -> str:
        written = " free*" if tool.is_free else self._parameters(parameters_of(tool))
        return f"function_{number}: {self._function(tool.name, written)}\n"

    def _parameters(self, parameters: Sequence[Parameter]) -> str:
        written = ""
        for parameter in parameters:
            name = parameter.name
            if name != name.strip() or not name or any(character in "<>\n" for character in name):
                text = f"{name[:64]!r} cannot be a parameter's name in this model's format of calls"
                raise GrammarRefused(text, parameter.place)
            value = self._values.value(parameter)
            written += f" ({self._head(quoted(name))} ({value}) {self._after_value()})"
            written += "" if parameter.is_required else "?"
        return written

    def _after_value(self) -> str:
        return ""


class Qwen3CoderCallGrammar(_TaggedValueCallGrammar):
    """A lazy grammar lets a call begin with either tag, because these models forget the first."""

    _tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    _end: ClassVar[str] = "</parameter>"
    _frame: ClassVar[str] = "\n"
    _never: ClassVar[str] = r"\n(<parameter=|(<\/function>[ \t\r\n]*)?<\/tool_call>[ \t\r\n]*<tool_call>\n<function=)"

    def _rules(self) -> str:
        end = self._literal("</tool_call>")
        return f'rest_0: "\\n<function=" function "\\n" {end}\nrest_1: function ("\\n" {end})?\n' + self._functions()

    def _head(self, name: str) -> str:
        return f'"<parameter=" {name} ">\\n"'

    def _after_value(self) -> str:
        return quoted("\n")

    def _function(self, name: str, parameters: str) -> str:
        return f'{quoted(f"{name}>{chr(10)}")}{parameters} "</function>"'


class Glm45CallGrammar(_TaggedValueCallGrammar):
    """Allows line breaks between the tags, as GLM-4.5 and 4.6 write them, or none, as GLM-4.7."""

    _tags: ClassVar[tuple[str, ...]] = (glm45.CALL,)
    _end: ClassVar[str] = glm45.VALUE_END
    _frame: ClassVar[str] = ""
    _never: ClassVar[str] = r"\n(<arg_key>|<\/tool_call>[ \t\r\n]*<tool_call>)"

    def _rules(self) -> str:
        return "rest_0: function\n" + self._functions()

    def _head(self, name: str) -> str:
        key, key_end, value = (self._literal(tag) for tag in (glm45.KEY, glm45.KEY_END, glm45.VALUE))
        return f'("\\n")? {key} {name} {key_end} ("\\n")? {value}'

    def _function(self, name: str, parameters: str) -> str:
        return f'{quoted(name)}{parameters} ("\\n")? {self._literal(glm45.CALL_END)}'
