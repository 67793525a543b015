"""Splits a tool's schema into single parameters, for model families that do not write them as one JSON object.
Never accepts a rule between parameters: what cannot be enforced for each alone is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.grammars.lark_rules import Lark
from serve_app.grammars.notation import GrammarRefused, Json
from serve_app.grammars.schema_parts import subschemas
from serve_app.parsing.call_grammar import CallableTool, arguments_schema
from serve_app.parsing.typed_values import resolved

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"}
)
_KEPT = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_SHARED = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `schema` is complete: it includes the definitions that it refers to."""

    name: str
    schema: Json
    is_required: bool
    place: str
    text: Lark | None = None
    """The grammar of a string, if no schema can describe it."""


def parameters_of(tool: CallableTool) -> list[Parameter]:
    """List the parameters in the schema's order. Additional ones are never written.

    Raises:
        GrammarRefused: the schema has rules beyond those of each parameter, or a reference to something that is not a
            definition.
    """
    root = arguments_schema(tool)
    root = resolved(root, root)
    if other := next((name for name in root if name not in _KEPT), None):
        raise GrammarRefused(f"the keyword {other[:50]!r} cannot be kept in this model's format of calls", tool.place)
    properties, required = root.get("properties", {}), root.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise GrammarRefused("should have an object of properties, and a list of required ones", tool.place)
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise GrammarRefused(f"should describe the required property {str(name)[:50]!r}", tool.place)
    definitions = _Definitions({word: root[word] for word in _SHARED if word in root})
    parameters = []
    for name, schema in properties.items():
        if schema is False and name not in required:
            continue
        place = f"{tool.place}.properties.{name}"
        parameters.append(Parameter(name, definitions.beside(schema, place), name in required, place, tool.text))
    return parameters


class _Definitions:
    """The definitions that a tool's parameters share. They are checked once, however many parameters refer to them."""

    def __init__(self, definitions: Json) -> None:
        self._definitions = definitions
        self._checked = False

    def beside(self, schema: Any, place: str) -> Json:
        """Return a schema with the definitions that it refers to.

        Raises:
            GrammarRefused: it is not a schema, or a reference in it or in a definition is not to a definition.
        """
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise GrammarRefused("should be a JSON schema", place)
        if not _check_references(schema, place):
            return schema
        if not self._checked:
            _check_references(self._definitions, place)
            self._checked = True
        return self._definitions | schema


def _check_references(schema: Json, place: str) -> bool:
    """Check all references, and return whether there are any."""
    references = [part["$ref"] for part in subschemas(schema) if "$ref" in part]
    for reference in references:
        if not str(reference).startswith(tuple(f"#/{word}/" for word in _SHARED)):
            text = f"the reference {str(reference)[:50]!r} cannot be kept in this model's format of calls"
            raise GrammarRefused(text, place)
    return bool(references)


def only_annotated(schema: Json, *kept: str) -> bool:
    """Whether the schema has no other keywords than these, annotations and definitions."""
    return all(name in ANNOTATIONS or name in _SHARED or name in kept for name in schema)
