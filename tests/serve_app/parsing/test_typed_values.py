"""Owns the contract of values that a model writes as text: which JSON they are by the tool's schema.
Never reads a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.parsing.typed_values import property_schema, value_json

KINDS = ["string", "integer", "number", "boolean", "object", "array", "null"]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("string", " 5 ", '" 5 "'),
        ("string", "null", '"null"'),
        ("string", 'é"\n', '"é\\"\\n"'),
        ("integer", " -5\n", "-5"),
        ("integer", "5.0", "5"),
        ("integer", "5.5", '"5.5"'),
        ("integer", "true", '"true"'),
        ("integer", "007", '"007"'),
        ("number", "5", "5"),
        ("number", "-1.50e3", "-1.50e3"),
        ("number", "1e999", '"1e999"'),
        ("number", "NaN", '"NaN"'),
        ("boolean", "True", "true"),
        ("boolean", "false", "false"),
        ("boolean", "yes", '"yes"'),
        ("null", "None", "null"),
        ("null", "no", '"no"'),
        ("object", '{"a": [1]}', '{"a": [1]}'),
        ("object", "{'a': True}", '{"a": true}'),
        ("object", "[1]", '"[1]"'),
        ("object", '{"a": NaN}', '"{\\"a\\": NaN}"'),
        ("array", '["é"]', '["é"]'),
        ("array", "('a',)", "\"('a',)\""),
        ("array", "[f()]", '"[f()]"'),
        ("unheard of", "5", '"5"'),
    ],
)
def test_a_value_has_its_declared_type_or_is_a_string(kind: str, text: str, expected: str) -> None:
    assert value_json(text, {"type": kind}) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "nil", '"nil"'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["number", "boolean"]}, "true", "true"),
        ({"anyOf": [{"type": "array"}, {"oneOf": [{"type": "object"}]}]}, "{}", "{}"),
        ({"anyOf": "wrong", "type": 5}, "5", '"5"'),
        ({}, "5", '"5"'),
        (None, "5", '"5"'),
        (True, "5", '"5"'),
    ],
)
def test_with_several_types_string_is_tried_last_and_without_any_type_it_is_the_only_one(
    schema: Any, text: str, expected: str
) -> None:
    assert value_json(text, schema) == expected


@pytest.mark.parametrize("schema", [None, True, {}, {"properties": 5}, {"properties": {"b": {}}}])
def test_a_parameter_that_the_schema_does_not_have_has_no_schema(schema: Any) -> None:
    assert property_schema(schema, "a") is None


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$ref": "#/$defs/number"}, "5", "5"),
        ({"$ref": "#/$defs/alias"}, "5", "5"),
        ({"$ref": "/$defs/alias"}, "5", "5"),
        ({"anyOf": [{"$ref": "/$defs/number"}, {"type": "null"}]}, "null", "null"),
        ({"anyOf": [{"$ref": "#/definitions/a~1b"}, {"type": "null"}]}, '{"k": 1}', '{"k": 1}'),
        ({"$ref": "#/$defs/circle"}, "5", '"5"'),
        ({"$ref": "#/$defs/nowhere"}, "5", '"5"'),
        ({"$ref": 5}, "5", '"5"'),
        ({"$ref": "https://example.org/number"}, "5", '"5"'),
    ],
)
def test_a_type_is_found_through_references_that_end_inside_the_schema(schema: Any, text: str, expected: str) -> None:
    definitions = {"number": {"type": "integer"}, "alias": {"$ref": "#/$defs/number"}}
    definitions["circle"] = {"$ref": "#/$defs/circle"}
    root = {"properties": {"a": schema}, "$defs": definitions, "definitions": {"a/b": {"type": "object"}}}
    assert value_json(text, property_schema(root, "a")) == expected


@given(st.text() | st.text("0123456789.eE+-[]{}'\":,truefalsN() "), st.lists(st.sampled_from(KINDS)))
def test_any_text_becomes_json_that_every_client_can_read(text: str, kinds: list[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(value_json(text, {"type": kinds}), parse_constant=refuse)
