"""Owns the parts of a JSON schema: the schemas inside it, its texts, and what says nothing about a value.
Never refuses a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from serve_app.grammars.notation import Json

_ONE = ("additionalProperties", "items", "additionalItems", "unevaluatedItems", "contains", "not", "if", "then", "else")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEYWORDS = frozenset({*_ONE, *_MANY, *_NAMED})
UNWRITTEN = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Annotations, which say nothing about a value, and make up most of a tool's schema."""
_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
        *("uuid", "regex"),
    }
)
"""The formats that JSON Schema defines. Any other is an annotation, such as pydantic's `path` and `password`."""
_EMPTY: dict[str, Any] = {"uniqueItems": False, "dependentRequired": {}, "dependentSchemas": {}}
"""Keywords that llguidance refuses, with the value that constrains nothing."""


def subschemas(schema: Any) -> Iterator[Json]:
    """Yield a schema and all schemas inside it, wherever a keyword holds one. Names of properties are not keywords."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            inner = [schema for name, value in part.items() if name in _KEYWORDS for schema in _schemas_of(name, value)]
            waiting += reversed(inner)


def _schemas_of(name: str, value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values() if name in _NAMED else (value,) if name in _ONE else ()
    return value if isinstance(value, list) and name in _MANY else ()


def bare(schema: Json) -> Json:
    """Return the schema without what says nothing about a value. Its annotations stay if a reference leads into one."""
    references = [part["$ref"] for part in subschemas(schema) if isinstance(part.get("$ref"), str)]
    are_used = any(name in UNWRITTEN for reference in references for name in reference.split("/"))
    written: Json = _without(schema, frozenset() if are_used else UNWRITTEN)
    return written


def _without(schema: Any, left_out: frozenset[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {
        name: _kept(name, value, left_out)
        for name, value in schema.items()
        if name not in left_out and not _is_idle(name, value)
    }


def _kept(name: str, value: Any, left_out: frozenset[str]) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {key: _without(entry, left_out) for key, entry in value.items()}
    if name in _MANY and isinstance(value, list):
        return [_without(option, left_out) for option in value]
    return _without(value, left_out) if name in _ONE else value


def _is_idle(name: str, value: Any) -> bool:
    """Whether a keyword that llguidance would refuse constrains nothing with this value."""
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS
    if name == "propertyNames":
        return value is True or (isinstance(value, dict) and _without(value, UNWRITTEN) in ({}, {"type": "string"}))
    if name in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True or value == {}
    return name in _EMPTY and type(value) is type(_EMPTY[name]) and value == _EMPTY[name]


def rewritten(schema: Any, write: Callable[[Json], Json]) -> Any:
    """Return what `write` makes of a schema, once it has been made of all schemas inside it. A reference may lead
    anywhere, so everything counts as one apart from names and from the values of `const` and `enum`."""
    if isinstance(schema, list):
        return [rewritten(one, write) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return write({name: _inside(name, value, write) for name, value in schema.items()})


def _inside(name: str, value: Any, write: Callable[[Json], Json]) -> Any:
    if name in _NAMED and isinstance(value, dict):
        return {key: rewritten(entry, write) for key, entry in value.items()}
    return value if name in ("const", "enum") else rewritten(value, write)


def dicts(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in inside(value):
            yield from dicts(inner)


def texts(schema: Json) -> Iterator[str]:
    """Yield the strings that values are compared with."""
    for part in dicts(schema):
        for value in (part.get("const"), *(part["enum"] if isinstance(part.get("enum"), list) else ())):
            yield from (one for one in _scalars(value) if isinstance(one, str))


def _scalars(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict | list):
        yield value
        return
    if isinstance(value, dict):
        yield from value
    for inner in inside(value):
        yield from _scalars(inner)


def inside(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)
