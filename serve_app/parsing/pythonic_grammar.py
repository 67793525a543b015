"""Builds the grammar of pythonic calls: keyword arguments, each of them JSON that is also a Python literal.
Never allows `True` or `None`: the parser reads JSON's words, too, and one notation is enough."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from typing import Any

from serve_app.grammars.notation import Grammar, GrammarRefused, Json, quoted
from serve_app.parsing.call_grammar import CallableTool, CallGrammar, string_rule
from serve_app.parsing.parameters import Parameter, only_annotated, parameters_of
from serve_app.parsing.shared_rules import SharedRules
from serve_app.parsing.typed_values import resolved

_NO_LIST = r"(\s*[^\s\[](?s:.*))?"
_NUMBER = r"/-?(0|[1-9][0-9]{0,199})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/"
"""Numbers within a double's range: 1e999 is valid JSON, but infinite in Python, which JSON cannot write."""


class PythonicCallGrammar(CallGrammar):
    """Without a tag, an answer that begins with a list consists of calls, so a lazy one cannot begin with another."""

    def calls(self) -> Grammar:
        return self._lark(f"start: calls\n{self._rules()}")

    def lazy(self) -> Grammar:
        return self._lark(f"start: calls | PLAIN\nPLAIN: /{_NO_LIST}/\n{self._rules()}")

    def _rules(self) -> str:
        names = " | ".join(f"call_{number}" for number in range(len(self._tools)))
        calls = "".join(_call(number, tool, self._shared) for number, tool in enumerate(self._tools))
        return f'calls: "[" {self._repeated("call", ", ")} "]"\ncall: {names}\n{calls}'


def _call(number: int, tool: CallableTool, shared: SharedRules) -> str:
    if not all(_is_identifier(part) for part in tool.name.split(".")):
        raise GrammarRefused(f"{tool.name[:64]!r} cannot be a function's name in Python", tool.place)
    head = quoted(f"{tool.name}(")
    if tool.is_free:
        return f'call_{number}: {head} (free_{number} (", " free_{number})*)? ")"\n' + (
            f'free_{number}: /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ "=" {shared.json({})}\n'
        )
    return f'call_{number}: {head} first_{number}_0 ")"\n' + _arguments(number, parameters_of(tool), shared)


def _arguments(call: int, parameters: Sequence[Parameter], shared: SharedRules) -> str:
    """Write rules for the arguments from the i-th on, after others (`more`) or at the beginning (`first`)."""
    rules = ""
    for place, parameter in enumerate(parameters):
        if not _is_identifier(parameter.name):
            text = f"{parameter.name[:64]!r} cannot be an argument's name in Python"
            raise GrammarRefused(text, parameter.place)
        item, later = f"item_{call}_{place} more_{call}_{place + 1}", "" if parameter.is_required else "| {}"
        rules += f"item_{call}_{place}: {quoted(parameter.name + '=')} {value_rule(parameter, shared)}\n"
        rules += f"first_{call}_{place}: {item} {later.format(f'first_{call}_{place + 1}')}\n"
        rules += f'more_{call}_{place}: ", " {item} {later.format(f"more_{call}_{place + 1}")}\n'
    return rules + f'first_{call}_{len(parameters)}: ""\nmore_{call}_{len(parameters)}: ""\n'


def value_rule(parameter: Parameter, shared: SharedRules) -> str:
    """Write what stands in a rule for JSON that is also a Python literal."""
    if parameter.text is not None:
        return string_rule(parameter.text)
    has_number, others = _without_number(parameter.schema, parameter.schema)
    if not has_number:
        return shared.json(parameter.schema)
    return f"({_NUMBER} | {shared.json(others)})" if others else _NUMBER


def _without_number(schema: Any, root: Json) -> tuple[bool, Any]:
    """Return whether any number is among the values of a schema, and the schema of the other values, `None` if there
    are none. References are followed only to what is nothing but a number."""
    if not isinstance(schema, dict):
        return False, schema
    if _is_number(resolved(schema, root)):
        return True, None
    kinds = schema.get("type")
    if isinstance(kinds, list) and only_annotated(schema, "type"):
        others = [kind for kind in kinds if kind != "number"]
        return len(others) < len(kinds), schema | {"type": others} if others else None
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list) and only_annotated(schema, word):
            each = [_without_number(option, root) for option in options]
            others = [other for _, other in each if other is not None]
            return any(has_number for has_number, _ in each), schema | {word: others} if others else None
    return False, schema


def _is_number(schema: Json) -> bool:
    return schema.get("type") == "number" and only_annotated(schema, "type")


def _is_identifier(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
