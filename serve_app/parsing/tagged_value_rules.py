"""Writes the rules for one parameter's value up to its end tag: strings as plain text, everything else as JSON.
Never allows a value that the parser would read back as another type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve_app.grammars.encodings import as_it_is
from serve_app.grammars.nested import nested_rules
from serve_app.grammars.notation import GrammarRefused, Json, Specials, escaped, literal, quoted, without
from serve_app.grammars.regular import of_whole
from serve_app.parsing.parameters import Parameter, only_annotated
from serve_app.parsing.pythonic_grammar import value_rule
from serve_app.parsing.shared_rules import SharedRules
from serve_app.parsing.typed_values import UNTYPED, Types, declared_types, resolved

_LONGEST = 2**20  # characters
_UNSAFE = re.compile(r"\\[\s\S]|[/\n]")
_SAFE = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


class ValueRules:
    """Writes rules. `frame`: the text that precedes and follows a value. `never`: a regex of what ends a value without
    its end tag."""

    def __init__(self, end: str, frame: str, never: str, specials: Specials, shared: SharedRules) -> None:
        self._end = end
        self._frame = frame
        self._besides = without(never)
        self._specials = specials
        self._shared = shared

    def value(self, parameter: Parameter) -> str:
        """Write the value with its end tag: a value that may be a string as plain text, any other as JSON."""
        if parameter.text is not None:
            return f"{nested_rules(parameter.text, as_it_is(self._end, self._frame))} {self._apart()}"
        root = parameter.schema
        schema, kinds = resolved(root, root), declared_types(root, root)
        if "string" not in kinds:
            typed = root if _is_typed(schema) else root | {"type": sorted(kinds)}
            return f"{value_rule(replace(parameter, schema=typed), self._shared)} {self._closing()}"
        found = [self._option(option, declared_types(option, root)) for option in _options(schema)]
        if None in found:
            text = "a value that may be a string cannot be more than a text, its lengths, an enum or null"
            raise GrammarRefused(f"{text} in this model's format of calls", parameter.place)
        return " | ".join(option for option in found if option is not None)

    def text(self, least: int | None = 0, most: int | None = None) -> str:
        """Name the rule for a text and the end tag after it; the text cannot contain the end tag."""
        times = "*" if not least and most is None else f"{{{least or 0},{'' if most is None else most}}}"
        return self._ended(f"(?s:.{times})")

    def _ended(self, text: str) -> str:
        """Name the same for a text that a regex matches."""
        return self._shared.named(f"text {text}", lambda rule: self._rules_of(rule, text))

    def _rules_of(self, rule: str, text: str) -> str:
        name, end, frame = rule.upper(), escaped(self._end), escaped(self._frame)
        if self._end in self._specials:
            closed = f"{rule}: {name}_TEXT {literal(self._end, self._specials)}\n"
            return f"{closed}{name}_TEXT: /{text}{frame}/{without(end)}{self._besides}\n"
        return f"{rule}[lazy]: {name}_END\n{name}_END: /{text}{frame}{end}/ & ~/(?s:.*){end}(?s:.+)/{self._besides}\n"

    def _closing(self, text: str = "") -> str:
        return literal(f"{text}{self._frame}{self._end}", self._specials)

    def _apart(self) -> str:
        """Write the end tag after a text in which the first characters of the tag and the frame are lexemes of their
        own.
        """
        frame = "".join(f"{quoted(character)} " for character in self._frame)
        if self._end in self._specials:
            return f"{frame}{literal(self._end, self._specials)}"
        return f"{frame}{quoted(self._end[0])} {quoted(self._end[1:])}"

    def _option(self, schema: Json, kinds: Types) -> str | None:
        """Write one alternative of a schema; None if it cannot be written."""
        if kinds - {"string", "null"} and kinds != UNTYPED:
            return None
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list):
            is_kept = only_annotated(schema, "type", "enum", "const")
            return self._listed(listed, kinds) if is_kept else None
        if kinds == {"null"}:
            return self._closing("null") if only_annotated(schema, "type") else None
        if kinds == {"string"} and (pattern := _pattern(schema)) is not None:
            return self._ended(f"(?:{pattern})")
        if not only_annotated(schema, "type", "minLength", "maxLength"):
            return None  # beside these, an object or a list of an untyped value is as good as a text
        text = self.text(_bound(schema, "minLength", 0), _bound(schema, "maxLength", None))
        return f"{self._closing('null')} | {text}" if "null" in kinds else text

    def _listed(self, values: Sequence[Any], kinds: Types) -> str | None:
        texts = ["null" if value is None else value for value in values]
        for value in texts:
            if not isinstance(value, str) or self._end in value:
                return None
        mistaken = [value for value in values if isinstance(value, str) and value.strip().lower() in ("null", "none")]
        if ("null" in kinds and mistaken) or (None in values and "null" not in kinds):
            return None
        ends = self._closing()
        return " | ".join(f"{quoted(text)} {ends}" if text else ends for text in texts)


def _is_typed(schema: Any) -> bool:
    """Whether the schema declares all types of the value, so that the parser knows them."""
    if not isinstance(schema, dict):
        return False
    listed = [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)]
    options = [option for options in listed for option in options]
    return "type" in schema or (bool(options) and all(_is_typed(option) for option in options))


def _options(schema: Json) -> Sequence[Json]:
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list) and only_annotated(schema, word) and all(isinstance(one, dict) for one in options):
            return options
    return [schema]


def _bound(schema: Json, name: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    return min(value, _LONGEST) if isinstance(value, int) and value >= 0 else default


def _pattern(schema: Json) -> str | None:
    """Return a pattern for the whole text, to stand between slashes; None if it may match only a part of the text."""
    pattern = schema.get("pattern")
    if not only_annotated(schema, "type", "pattern") or not isinstance(pattern, str):
        return None
    inner = of_whole(pattern)
    return None if inner is None else _UNSAFE.sub(lambda match: _SAFE.get(match[0], match[0]), inner)
