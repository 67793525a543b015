"""Converts values that a model writes as plain text to JSON, by the types that the tool's JSON schema declares.
Never refuses a value: one that fits no declared type becomes a string, and the client's validation reports it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from serve_app.grammars.json_schema import fragment
from serve_app.parsing.python_literals import dump_json, parse_expression, to_json

MAX_REFERENCES = 8
"""The longest chain of references that is followed, because a chain may be circular."""


def property_schema(schema: Any, name: str) -> Any:
    """Return the schema of one parameter, with references resolved at the top; None if there is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return resolved(properties.get(name), schema) if isinstance(properties, Mapping) else None


def property_names(schema: Any) -> set[str]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return set(properties) if isinstance(properties, Mapping) else set()


def resolved(schema: Any, root: Any) -> Any:
    """Replace references to definitions in `root`, in the schema and its alternatives. Unknown references stay."""
    schema = _followed(schema, root)
    for word in ("anyOf", "oneOf"):
        options = schema.get(word) if isinstance(schema, Mapping) else None
        if isinstance(options, list):
            schema = {**schema, word: [_followed(option, root) for option in options]}
    return schema


def _followed(schema: Any, root: Any) -> Any:
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        target = _find(root, reference) if isinstance(reference, str) else None
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def _find(root: Any, reference: str) -> Any:
    for name in fragment(reference).removeprefix("#/").split("/"):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def value_json(text: str, schema: Any) -> str:
    """Write a value as JSON. It is a string only if no other declared type fits, or no type is declared."""
    declared = declared_types(schema)
    for kind, read in _READERS.items():
        if kind in declared and (written := read(text.strip())) is not None:
            return written
    return dump_json(text)


def is_string(schema: Any) -> bool:
    """Whether a value can only be a string."""
    return declared_types(schema) <= {"string"}


def declared_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    kinds = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else []:
            kinds |= declared_types(option)
    return kinds


def _integer(text: str) -> str | None:
    value = _load(text)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return text if isinstance(value, int) and not isinstance(value, bool) else None


def _number(text: str) -> str | None:
    value = _load(text)
    return text if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


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


_READERS: Mapping[str, Callable[[str], str | None]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": lambda text: _container(text, "{", dict),
    "array": lambda text: _container(text, "[", list),
}
