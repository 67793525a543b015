"""Owns what the grammars of calls have in common: the tools that may be called, and where in an answer calls may be.
Never knows how one family writes a call."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from serve_app.grammars.encodings import JSON_STRING
from serve_app.grammars.json_schema import checked, with_fragments
from serve_app.grammars.lark_rules import Lark
from serve_app.grammars.nested import nested_rules
from serve_app.grammars.notation import Grammar, GrammarRefused, Json, Specials, heads, lark, literal, quoted
from serve_app.parsing.shared_rules import SharedRules


@dataclass(frozen=True, slots=True)
class CallableTool:
    """`place`: the field that has the parameters, for refusals. `is_free`: any arguments will do."""

    name: str
    parameters: Json | None
    place: str
    is_free: bool = False
    text: Lark | None = None
    """The grammar of its one argument, a string, where no schema can say it."""


class CallGrammar(ABC):
    """What it admits, the parser of the same name reads back as calls of these tools, with arguments that their schemas
    allow, and, after thoughts, as nothing else unless it is lazy.

    Both ways raise GrammarRefused for a tool whose schema the family's notation cannot keep.
    """

    def __init__(self, tools: Sequence[CallableTool], specials: Specials, *, parallel: bool) -> None:
        """`specials`: of the model's tokenizer. `parallel`: more than one call may be made."""
        assert tools, "nothing can be called"
        self._tools = tools
        self._specials = specials
        self._parallel = parallel
        self._shared = SharedRules()

    @abstractmethod
    def calls(self) -> Grammar:
        """One or more calls, and nothing else."""

    @abstractmethod
    def lazy(self) -> Grammar:
        """Any text, in which calls begin as they do in this family; what begins like one is one."""

    def _lark(self, rules: str) -> Grammar:
        """Of rules that are all written by now."""
        return lark(f"{rules}{self._shared.text()}")

    def _literal(self, text: str) -> str:
        return literal(text, self._specials)

    def _objects(self, key: str) -> str:
        """A rule `object`: a call as a JSON object with its arguments under `key`."""
        head = '{{"name": {}, "{}": '
        options = [
            f"{quoted(head.format(json.dumps(tool.name), key))} {arguments_rule(tool, self._shared)} {quoted('}')}"
            for tool in self._tools
        ]
        return f"object: {' | '.join(options)}\n"

    def _repeated(self, rule: str, between: str) -> str:
        return f"{rule} ({quoted(between)} {rule})*" if self._parallel else rule


class TaggedCallGrammar(CallGrammar):
    """Calls that begin with a tag, wherever they are in a text."""

    _tags: ClassVar[tuple[str, ...]]
    """What a call begins with; the first is written where a call must be made."""
    _goes_on: ClassVar[bool] = True
    """Text may follow a call."""

    @abstractmethod
    def _rules(self) -> str:
        """With a rule `rest_0`, the call after its first tag, and so on."""

    @abstractmethod
    def _all(self) -> str:
        """One or more calls, in terms of `rest_0`."""

    def calls(self) -> Grammar:
        return self._lark(f"start: {self._all()}\n{self._rules()}")

    def lazy(self) -> Grammar:
        calls = " | ".join(f"head_{number} rest_{number}" for number in range(len(self._tags)))
        start = f"({calls})* TEXT" if self._parallel and self._goes_on else f"{calls} | TEXT"
        return self._lark(f"start: {start}\n{heads(self._tags, self._specials)}{self._rules()}")


def arguments_rule(tool: CallableTool, shared: SharedRules) -> str:
    """What stands in a rule for all arguments as one object.

    Raises:
        GrammarRefused: the schema is too large, or of something else, or the text's grammar cannot be kept.
    """
    schema = arguments_schema(tool)
    if tool.text is None:
        return shared.json(schema)
    (name,) = schema["properties"]
    return f"{quoted(f'{{{json.dumps(name)}: ')} {string_rule(tool.text)} {quoted('}')}"


def string_rule(text: Lark) -> str:
    """The same for a string in JSON whose text is of a grammar.

    Raises:
        GrammarRefused: it cannot be kept.
    """
    mark = quoted('"')
    return f"{mark} {nested_rules(text, JSON_STRING)} {mark}"


def arguments_schema(tool: CallableTool) -> Json:
    """The schema of all arguments as one object; every reference in it begins with `#`, or names another document.

    Raises:
        GrammarRefused: the schema is too large, or of something else.
    """
    if tool.is_free:
        return {"type": "object"}
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.parameters.get("type", "object") != "object":
        raise GrammarRefused("should be the schema of an object", f"{tool.place}.type")
    try:
        return with_fragments(checked(tool.parameters | {"type": "object"}))
    except GrammarRefused as refused:
        raise GrammarRefused(refused.text, tool.place) from refused
