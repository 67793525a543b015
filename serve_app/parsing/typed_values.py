"""Owns the JSON of values that a model writes as plain text, by the types that the tool's JSON schema declares.
Never refuses a value: what fits no declared type is a string, and the client's validation says so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from serve_app.parsing.python_literals import dump_json, parse_expression, to_json


def property_schema(schema: Any, name: str) -> Any:
    """The schema of one parameter; None if there is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def value_json(text: str, schema: Any) -> str:
    """A string only if no other declared type fits; without declared types always."""
    declared = declared_types(schema)
    for kind, read in _READERS.items():
        if kind in declared and (found := read(text.strip())) is not None:
            return found
    return dump_json(text)


def is_string(schema: Any) -> bool:
    """Whether a value can only be a string."""
    return declared_types(schema) <= {"string"}


def declared_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    found = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else []:
            found |= declared_types(option)
    return found


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
    """The model's own JSON; or a Python literal, which models write where JSON is meant."""
    if not text.startswith(opening):
        return None
    if isinstance(_load(text), kind):
        return text
    try:
        return to_json(parse_expression(text))
    except ValueError:
        return None


def _load(text: str) -> Any:
    """None if it is not JSON."""
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
