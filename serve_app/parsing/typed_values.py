"""Converts values that a model writes as plain text to JSON, by the types that the tool's JSON schema declares.
Never refuses a value: one that fits no declared type becomes a string, and the client's validation reports it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from pydantic_core import from_json

from serve_app.grammars.json_schema import fragment
from serve_app.grammars.schema_parts import subschemas
from serve_app.parsing.python_literals import dump_json, parse_expression, to_json

Types: TypeAlias = frozenset[str]

MAX_DEPTH = 32
"""How deep references and alternatives are followed, because a reference may be circular."""
MAX_SCHEMAS = 1000
"""How many schemas are looked at for one type, because each alternative may have as many again."""

UNTYPED: Types = frozenset({"string", "object", "array"})
"""What a value may be if its schema does not tell. Objects and lists stand in the text as JSON. A number and a string
of digits stand there alike: only as a string does it keep all characters, such as those of a postal code."""

_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_OF_LISTS = ("items", "prefixItems")
_ALTERNATIVES = ("anyOf", "oneOf")
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class ParameterTypes:
    """The parameters of one tool."""

    def __init__(self, schema: Any) -> None:
        """`schema`: the tool's; anything else than a schema has no parameters."""
        self._schema = schema
        self._properties = _Reader(schema).properties(schema)
        self._types: dict[str, Types] = {}

    @property
    def names(self) -> set[str]:
        return set(self._properties)

    def types(self, name: str) -> Types:
        if name not in self._types:
            self._types[name] = declared_types(self._properties.get(name), self._schema)
        return self._types[name]


def declared_types(schema: Any, root: Any) -> Types:
    """Return the types that a value may have. `root`: the schema that references lead into."""
    return _Reader(root).types(schema) or UNTYPED


class _Reader:
    """Reads schemas inside one schema, the root. Types that are not declared are `None`."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_SCHEMAS
        self._targets: dict[str, Any] = {}

    def properties(self, schema: Any, depth: int = 0) -> dict[str, Any]:
        """Return the schemas of an object's properties, wherever references and combinations declare them."""
        found: dict[str, list[Any]] = {}
        if not self._may_read(schema, depth):
            return {}
        own = schema.get("properties")
        each = [own if isinstance(own, Mapping) else {}]
        each += [self.properties(part, depth + 1) for part in self._parts(schema)]
        for word in _ALTERNATIVES:
            options = [self.properties(option, depth + 1) for option in _listed(schema, word)]
            names = dict.fromkeys(name for option in options for name in option)
            each.append({name: {"anyOf": [one[name] for one in options if name in one]} for name in names})
        for properties in each:
            for name, value in properties.items():
                found.setdefault(name, []).append(value)
        return {name: values[0] if len(values) == 1 else {"allOf": values} for name, values in found.items()}

    def types(self, schema: Any, depth: int = 0) -> Types | None:
        return self._declared(schema, depth) or self._suggested(schema, depth) or self._implied(schema, depth)

    def _declared(self, schema: Any, depth: int) -> Types | None:
        """Return the types that all of a schema's keywords allow."""
        if not self._may_read(schema, depth):
            return None
        found: Types | None = None
        for types in self._each(schema, depth):
            found = types if found is None else _in_both(found, types) or found
        return found

    def _each(self, schema: Mapping[str, Any], depth: int) -> Iterator[Types]:
        kinds = schema.get("type")
        declared = frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        values = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else ())]
        options = [frozenset().union(*types) for options in self._options(schema, depth) if (types := _all(options))]
        parts = [self._declared(part, depth + 1) for part in self._parts(schema)]
        listed = frozenset(_KINDS.get(type(value), "null") for value in values)
        if listed and not any(isinstance(value, str) and _null(value.strip()) for value in values):
            listed |= declared & {"null"}  # OpenAI's strict tools declare an optional value so, and list only the texts
        yield from (types for types in (declared, listed, *options, *parts) if types)

    def _suggested(self, schema: Any, depth: int) -> Types | None:
        """Return the types that some alternatives name beside others that say nothing, and so allow any value."""
        if not self._may_read(schema, depth):
            return None
        for options in self._options(schema, depth):
            if named := [types for types in options if types]:
                return UNTYPED.union(*named)
        parts = (self._suggested(part, depth + 1) for part in self._parts(schema))
        return next((types for types in parts if types), None)

    def _options(self, schema: Mapping[str, Any], depth: int) -> list[list[Types | None]]:
        """Return the types of each list of alternatives."""
        return [[self.types(option, depth + 1) for option in _listed(schema, word)] for word in _ALTERNATIVES]

    def _implied(self, schema: Any, depth: int) -> Types | None:
        """Return the type whose keywords a schema has, which would say nothing about other values."""
        if not self._may_read(schema, depth):
            return None
        for words, kind in ((_OF_OBJECTS, "object"), (_OF_LISTS, "array")):
            if any(word in schema for word in words):
                return frozenset({kind})
        parts = (self._implied(part, depth + 1) for part in self._parts(schema))
        return next((types for types in parts if types), None)

    def _parts(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schemas that hold together with this one."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return [*_listed(schema, "allOf")]
        if reference not in self._targets:
            self._targets[reference] = _find(self._root, reference)
        return [self._targets[reference], *_listed(schema, "allOf")]

    def _may_read(self, schema: Any, depth: int) -> bool:
        self._left -= 1
        return isinstance(schema, Mapping) and depth < MAX_DEPTH and self._left >= 0


def _all(options: Sequence[Types | None]) -> Sequence[Types]:
    """Return the alternatives' types; nothing if one of them does not tell."""
    known = [types for types in options if types]
    return known if len(known) == len(options) else ()


def _listed(schema: Mapping[str, Any], word: str) -> Sequence[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else ()


def _in_both(one: Types, other: Types) -> Types:
    """Return the types that both allow; an integer is also a number."""
    integers = (
        {"integer"} if ("integer" in one and "number" in other) or ("number" in one and "integer" in other) else ()
    )
    return (one & other).union(integers)


def resolved(schema: Any, root: Any) -> Any:
    """Replace references, in the schema and its alternatives, by the definitions in `root` that they lead to, and
    `allOf` with one schema by that schema. Unknown references stay."""
    schema = _followed(schema, root)
    for word in _ALTERNATIVES:
        if isinstance(schema, Mapping) and (options := _listed(schema, word)):
            schema = {**schema, word: [_followed(option, root) for option in options]}
    return schema


def _followed(schema: Any, root: Any) -> Any:
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            break
        word, target = "$ref", schema.get("$ref")
        if isinstance(target, str):
            target = _find(root, target)
        elif len(parts := _listed(schema, "allOf")) == 1:
            word, target = "allOf", parts[0]
        rest = {key: value for key, value in schema.items() if key != word}
        if not isinstance(target, Mapping) or (word == "allOf" and rest | {**target} != {**target} | rest):
            break
        schema = {**target, **rest}
    return schema


def _find(root: Any, reference: str) -> Any:
    """Return what a reference leads to; None if it is not inside `root`."""
    document, _, inside = fragment(reference).partition("#")
    path = unquote(inside)
    if document:
        return None
    if path and not path.startswith("/"):
        return next((part for part in subschemas(root) if part.get("$anchor") == path), None)
    for name in path.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root


def value_json(text: str, types: Types) -> str:
    """Write a value as JSON. It is a string only if it fits no other of these types."""
    for kind, read in _READERS.items():
        if kind in types and (written := read(text.strip())) is not None:
            return written
    return dump_json(text)


def begun_json(text: str, types: Types) -> str:
    """Write a value that is cut off as JSON that is cut off. One that may be a string is one unless it can still become
    JSON of another of its types: nobody could read it otherwise."""
    begun = text.strip()
    kinds = types & _BEGUN.get(begun[:1], _NUMBERS) if begun else types - UNTYPED
    return text if "string" not in types or (kinds and _may_become_json(begun)) else dump_json(text)[:-1]


def _may_become_json(text: str) -> bool:
    try:
        from_json(text.encode(), allow_inf_nan=False)
    except ValueError as error:
        return str(error).startswith("EOF while parsing")
    return True


def _integer(text: str) -> str | None:
    value = _load(text)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return text if isinstance(value, int) and not isinstance(value, bool) else None


def _number(text: str) -> str | None:
    value = _load(text)
    if isinstance(value, float):
        return text if math.isfinite(value) else None
    return text if isinstance(value, int) and not isinstance(value, bool) else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _null(text: str) -> str | None:
    return "null" if text.lower() in ("null", "none") else None


def _container(text: str, opening: str, kind: type) -> str | None:
    """Read a container, as the model's own JSON or from a Python literal, which models write instead of JSON."""
    if not text.startswith(opening):
        return None
    if isinstance(_load(text), kind):
        return text
    try:
        return to_json(parse_expression(text))
    except ValueError:
        return None


def _load(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_NUMBERS: Types = frozenset({"integer", "number"})
_BEGUN: Mapping[str, Types] = {
    "{": frozenset({"object"}),
    "[": frozenset({"array"}),
    "n": frozenset({"null"}),
    "t": frozenset({"boolean"}),
    "f": frozenset({"boolean"}),
    '"': frozenset(),
}
"""The types of JSON that begins with a character. Any other begins a number, or no JSON."""

_READERS: Mapping[str, Callable[[str], str | None]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": lambda text: _container(text, "{", dict),
    "array": lambda text: _container(text, "[", list),
}
