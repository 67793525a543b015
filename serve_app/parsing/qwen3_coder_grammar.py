"""Owns the grammar of Qwen3-Coder's calls: each parameter between tags, strings as they are, and the rest as JSON.
Never admits a value that the parser would read back as another type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from serve_app.grammars.notation import GrammarRefused, Json, quoted
from serve_app.parsing.call_grammar import CallableTool, TaggedCallGrammar
from serve_app.parsing.parameters import Parameter, only_annotated, parameters_of
from serve_app.parsing.pythonic_grammar import value_rule
from serve_app.parsing.typed_values import declared_types, resolved

_END = "</parameter>"
_LONGEST = 2**20  # letters


class Qwen3CoderCallGrammar(TaggedCallGrammar):
    """Lazily, a call may begin with either tag, because these models forget the first."""

    _tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")

    def _all(self) -> str:
        return self._repeated(f"{self._literal('<tool_call>')} rest_0", "\n")

    def _rules(self) -> str:
        end = self._literal("</tool_call>")
        functions = [_Function(number, tool) for number, tool in enumerate(self._tools)]
        names = " | ".join(f"function_{number}" for number in range(len(functions)))
        return (
            f'rest_0: "\\n<function=" function "\\n" {end}\nrest_1: function ("\\n" {end})?\nfunction: {names}\n'
            'free: "<parameter=" /[^<>\\s][^<>\\n]{0,63}/ ">\\n" text "\\n"\n'
            f"{_text_rule('text')}{''.join(function.rules() for function in functions)}"
        )


class _Function:
    def __init__(self, number: int, tool: CallableTool) -> None:
        self._number = number
        self._tool = tool
        self._texts = ""

    def rules(self) -> str:
        parameters = " free*" if self._tool.is_free else self._parameters()
        head = quoted(f"{self._tool.name}>\n")
        return f'function_{self._number}: {head}{parameters} "</function>"\n{self._texts}'

    def _parameters(self) -> str:
        written = ""
        for place, parameter in enumerate(parameters_of(self._tool)):
            name = parameter.name
            if name != name.strip() or not name or any(letter in "<>\n" for letter in name):
                text = f"{name[:64]!r} cannot be a parameter's name in this model's format of calls"
                raise GrammarRefused(text, parameter.place)
            value = self._value(parameter, f"text_{self._number}_{place}")
            written += f" ({quoted(f'<parameter={name}>' + chr(10))} ({value}) {quoted(chr(10))})"
            written += "" if parameter.is_required else "?"
        return written

    def _value(self, parameter: Parameter, rule: str) -> str:
        """Up to the end tag. Where a value may be a string, it is written as it is; else as JSON."""
        schema = resolved(parameter.schema, parameter.schema)
        kinds = declared_types(schema)
        if "string" not in kinds and _is_typed(schema):
            return f"{value_rule(parameter)} {quoted(chr(10) + _END)}"
        options = [self._option(option, f"{rule}_{number}") for number, option in enumerate(_options(schema))]
        if None in options or kinds - {"string", "null"}:
            text = "a value that may be a string cannot be more than a text, its lengths, an enum or null"
            raise GrammarRefused(f"{text} in this model's format of calls", parameter.place)
        return " | ".join(option for option in options if option)

    def _option(self, schema: Json, rule: str) -> str | None:
        """None: it cannot be written."""
        kinds = declared_types(schema)
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list):
            return _listed(listed, kinds) if only_annotated(schema, "type", "enum", "const") else None
        if kinds == {"null"}:
            return quoted(f"null\n{_END}") if only_annotated(schema, "type") else None
        if not only_annotated(schema, "type", "minLength", "maxLength"):
            return None
        self._texts += _text_rule(rule, _bound(schema, "minLength", 0), _bound(schema, "maxLength", None))
        return f"{quoted(f'null{chr(10)}{_END}')} | {rule}" if "null" in kinds else rule


def _is_typed(schema: Any) -> bool:
    """Whether the parser knows all types that a value may have."""
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


def _listed(values: Sequence[Any], kinds: set[str]) -> str | None:
    texts = ["null" if value is None else value for value in values]
    for value in texts:
        if not isinstance(value, str) or _END in value:
            return None
    mistaken = [value for value in values if isinstance(value, str) and value.strip().lower() in ("null", "none")]
    if ("null" in kinds and mistaken) or (None in values and "null" not in kinds):
        return None
    return " | ".join(quoted(f"{text}\n{_END}") for text in texts)


def _bound(schema: Json, name: str, default: int | None) -> int | None:
    value = schema.get(name, default)
    return min(value, _LONGEST) if isinstance(value, int) and value >= 0 else default


def _text_rule(rule: str, least: int | None = 0, most: int | None = None) -> str:
    """A text and the end tag after it, which is nowhere before."""
    times = "*" if not least and most is None else f"{{{least or 0},{'' if most is None else most}}}"
    name, end = rule.upper(), _END.replace("/", "\\/")
    return f"{rule}[lazy]: {name}_END\n{name}_END: /(?s:.{times})\\n{end}/ & ~/(?s:.*){end}(?s:.+)/\n"
