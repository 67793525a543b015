"""Defines what the grammars of calls have in common: the tools that may be called, and where calls may stand.
Never knows how a particular model family writes a call."""

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
from serve_app.grammars.schema_parts import bare
from serve_app.parsing.shared_rules import SharedRules


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called. `place`: the field with its parameters, for refusals. `is_free`: arguments are
    free."""

    name: str
    parameters: Json | None
    place: str
    is_free: bool = False
    text: Lark | None = None
    """The grammar of the tool's only argument, a string, if no schema can describe it."""


class CallGrammar(ABC):
    """Builds the grammar of calls. The parser of the same name reads every text that it allows as calls of these tools,
    with arguments that follow their schemas; after thoughts there is nothing else, unless the grammar is lazy.

    Both methods raise GrammarRefused for a tool with a schema that the family's notation cannot enforce.
    """

    def __init__(self, tools: Sequence[CallableTool], specials: Specials, *, parallel: bool) -> None:
        """`specials`: the special tokens of the model's tokenizer. `parallel`: allow more than one call."""
        assert tools, "nothing can be called"
        self._tools = tools
        self._specials = specials
        self._parallel = parallel
        self._shared = SharedRules()

    @abstractmethod
    def calls(self) -> Grammar:
        """Build the grammar of one or more calls, and nothing else."""

    @abstractmethod
    def lazy(self) -> Grammar:
        """Build the grammar of any text with calls in it; whatever begins like one of the family's calls must be
        one."""

    def _lark(self, rules: str) -> Grammar:
        """Make the grammar, when all of its rules are written."""
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
    """A grammar of calls that begin with a tag, anywhere in a text."""

    _tags: ClassVar[tuple[str, ...]]
    """The tags with which a call may begin; a forced call begins with the first."""
    _goes_on: ClassVar[bool] = True
    """Whether text may follow a call."""

    @abstractmethod
    def _rules(self) -> str:
        """Write the rules, with a rule `rest_0` for a call after the first tag, `rest_1` after the second, and so
        on."""

    @abstractmethod
    def _all(self) -> str:
        """Write one or more calls, in terms of `rest_0`."""

    def calls(self) -> Grammar:
        return self._lark(f"start: {self._all()}\n{self._rules()}")

    def lazy(self) -> Grammar:
        calls = " | ".join(f"head_{number} rest_{number}" for number in range(len(self._tags)))
        start = f"({calls})* TEXT" if self._parallel and self._goes_on else f"{calls} | TEXT"
        return self._lark(f"start: {start}\n{self._heads()}{self._rules()}")

    def _heads(self) -> str:
        """Write the rules of free text, and of free text up to each of the tags."""
        return heads(self._tags, self._specials)


def arguments_rule(tool: CallableTool, shared: SharedRules) -> str:
    """Write what stands in a rule for all arguments as one object.

    Raises:
        GrammarRefused: the schema is too large, or not that of an object, or the text's grammar cannot be enforced.
    """
    schema = arguments_schema(tool)
    if tool.text is None:
        return shared.json(schema)
    (name,) = schema["properties"]
    return f"{quoted(f'{{{json.dumps(name)}: ')} {string_rule(tool.text)} {quoted('}')}"


def string_rule(text: Lark) -> str:
    """Write what stands in a rule for a JSON string with text that follows a grammar.

    Raises:
        GrammarRefused: the grammar cannot be enforced.
    """
    mark = quoted('"')
    return f"{mark} {nested_rules(text, JSON_STRING)} {mark}"


def arguments_schema(tool: CallableTool) -> Json:
    """Return the schema of all arguments as one object, without what says nothing about a value. Every reference in it
    begins with `#`, or names another document.

    Raises:
        GrammarRefused: the schema is too large, or not that of an object.
    """
    if tool.is_free:
        return {"type": "object"}
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.parameters.get("type", "object") != "object":
        raise GrammarRefused("should be the schema of an object", f"{tool.place}.type")
    try:
        return bare(with_fragments(checked(tool.parameters | {"type": "object"})))
    except GrammarRefused as refused:
        raise GrammarRefused(refused.text, tool.place) from refused
