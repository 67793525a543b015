"""Owns the contract of values that a model writes as text: which JSON they are by the tool's schema.
Never reads a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.parsing.typed_values import ParameterTypes, begun_json, declared_types, value_json


def written(text: str, schema: Any, **root: Any) -> str:
    """Return the JSON of the text of a parameter with this schema, in a tool's schema with these further keywords."""
    return value_json(text, ParameterTypes({"properties": {"a": schema}, **root}).types("a"))


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
        ("number", "1" * 310, "1" * 310),
        ("number", "1" * 4301, f'"{"1" * 4301}"'),
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
    assert written(text, {"type": kind}) == expected


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
    assert written(text, schema) == expected


@pytest.mark.parametrize("schema", [None, True, {}, {"properties": 5}, {"properties": {"b": {}}}])
def test_a_parameter_that_the_schema_does_not_have_has_any_type(schema: Any) -> None:
    types = ParameterTypes(schema)
    assert ("a" in types.names, types.types("a")) == (False, declared_types({}, None))


@pytest.mark.parametrize("schema", [{}, True, {"description": "x", "minLength": 1}, {"anyOf": [{}, {"minimum": 1}]}])
def test_without_a_type_an_object_or_a_list_is_one_and_a_number_stays_a_string(schema: Any) -> None:
    """A postal code of digits would lose its zeros."""
    for text, expected in [('{"x": [1]}', '{"x": [1]}'), ("[1]", "[1]"), ("5", '"5"'), ("true", '"true"')]:
        assert written(text, schema) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$ref": "#/$defs/number"}, "5", "5"),
        ({"$ref": "#/$defs/alias"}, "5", "5"),
        ({"$ref": "/$defs/alias"}, "5", "5"),
        ({"anyOf": [{"$ref": "/$defs/number"}, {"type": "null"}]}, "null", "null"),
        ({"anyOf": [{"$ref": "#/definitions/a~1b"}, {"type": "null"}]}, '{"k": 1}', '{"k": 1}'),
        ({"anyOf": [{"$ref": "#/$defs/union"}, {"type": "null"}]}, "5", "5"),
        ({"$ref": "#/$defs/a%20b"}, "5", "5"),
        ({"$ref": "#named"}, "5", "5"),
        ({"$ref": "#/$defs/union/anyOf/0"}, "5", "5"),
        ({"$ref": "#/$defs/union/anyOf/2"}, "5", '"5"'),
        ({"$ref": "#"}, '{"a": 1}', '{"a": 1}'),
        ({"$ref": "#/$defs/circle"}, "5", '"5"'),
        ({"$ref": "#/$defs/circles"}, "5", '"5"'),
        ({"$ref": "#/$defs/nowhere"}, "5", '"5"'),
        ({"$ref": 5}, "5", '"5"'),
        ({"$ref": "https://example.org/number"}, "5", '"5"'),
        ({"$ref": "https://example.org/#/$defs/number"}, "5", '"5"'),
    ],
)
def test_a_type_is_found_through_references_that_end_inside_the_schema(schema: Any, text: str, expected: str) -> None:
    definitions: dict[str, Any] = {
        "number": {"type": "integer"},
        "alias": {"$ref": "#/$defs/number"},
        "a b": {"type": "integer"},
        "other": {"$anchor": "named", "type": "integer"},
        "union": {"anyOf": [{"$ref": "#/$defs/alias"}, {"type": "object"}]},
        "circle": {"$ref": "#/$defs/circle"},
        "circles": {"anyOf": [{"$ref": "#/$defs/circles"}] * 100, "allOf": [{"$ref": "#/$defs/circles"}] * 100},
    }
    assert written(text, schema, **{"$defs": definitions, "definitions": {"a/b": {"type": "object"}}}) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"allOf": [{"type": "object"}], "description": "x"}, '{"a": 1}', '{"a": 1}'),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "5.0", "5"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "5.0", "5"),
        ({"allOf": [{"minimum": 1}, {"type": "integer"}]}, "5", "5"),
        ({"enum": [1, 2.5, None]}, "2.5", "2.5"),
        ({"enum": [1, 2.5, None]}, "null", "null"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": ["1", "2"], "type": ["string", "integer"]}, "1", '"1"'),
        ({"enum": ["a", "b"], "type": ["string", "null"]}, "null", "null"),
        ({"enum": ["a", "b"], "type": ["string", "null"]}, "a", '"a"'),
        ({"enum": ["a", "b"], "type": ["string", "integer", "null"]}, "5", '"5"'),
        ({"enum": ["none", "low"], "type": ["string", "null"]}, "none", '"none"'),
        ({"const": "a", "type": ["string", "null"]}, "null", "null"),
        ({"const": True}, "True", "true"),
        ({"const": {"a": 1}}, '{"a": 1}', '{"a": 1}'),
        ({"properties": {"x": {}}}, '{"x": 1}', '{"x": 1}'),
        ({"items": {"type": "string"}}, '["a"]', '["a"]'),
        ({"allOf": [{"items": {}}]}, "{}", '"{}"'),
        ({"type": ["array", "null"], "items": {}}, "null", "null"),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "[1]", '"[1]"'),
        ({"type": ["string", "integer"], "anyOf": [{"minimum": 1}, {"maxLength": 3}]}, "5", "5"),
        ({"type": ["string", "integer"], "anyOf": [{"minimum": 1}, {"type": "string"}]}, "5", "5"),
        ({"type": "integer", "allOf": [{"oneOf": [{"minimum": 1}, {"type": "string"}]}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}, {}]}, "5", "5"),
        ({"allOf": [{"anyOf": [{"type": "integer"}, {}]}]}, "[1]", "[1]"),
        ({"anyOf": [{}, {"type": "null"}]}, "null", "null"),
        ({"type": "object", "not": {"type": "null"}}, "{}", "{}"),
    ],
)
def test_a_type_is_what_all_of_a_schemas_keywords_allow(schema: Any, text: str, expected: str) -> None:
    assert written(text, schema) == expected


INTEGER = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/d", "$defs": {"d": INTEGER}},
        {"allOf": [{"$ref": "#/$defs/d"}, {"properties": {"a": {"minimum": 1}}}], "$defs": {"d": INTEGER}},
        {"anyOf": [INTEGER, {"properties": {"b": {}}}], "properties": {"a": {}}},
        {"properties": {"b": {}}, "oneOf": [{"required": ["a"]}, INTEGER]},
    ],
    ids=str,
)
def test_a_parameter_is_found_wherever_the_tools_schema_declares_it(schema: Any) -> None:
    types = ParameterTypes(schema)
    assert "a" in types.names
    assert value_json("5", types.types("a")) == "5"


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "{a", '"{a'),
        ({}, "a", '"a'),
        ({}, "[1, ", "[1, "),
        ({"type": ["string", "object"]}, "a", '"a'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "12 Main", '"12 Main'),
        ({"type": ["string", "null"]}, "nu", "nu"),
        ({"type": ["string", "null"]}, "new", '"new'),
        ({"type": ["string", "null"]}, "12", '"12'),
        ({"type": ["string", "null"]}, "", ""),
        ({"type": ["string", "null"]}, '"a', '"\\"a'),
        ({"type": "object"}, "{a", "{a"),
        ({}, "", '"'),
        ({}, '\n{"a": "b\\', '\n{"a": "b\\'),
        ({}, '{"a": [{}, tr', '{"a": [{}, tr'),
        ({}, "[-", "[-"),
        ({}, "[ERROR] disk fu", '"[ERROR] disk fu'),
        ({}, "[1] Smith", '"[1] Smith'),
        ({}, "{{ name }} i", '"{{ name }} i'),
        ({}, "[\ud800", '"[\\ud800'),
        ({}, "[" * 1000, '"' + "[" * 1000),
        ({"type": ["string", "object"]}, "[1", '"[1'),
    ],
)
def test_a_value_that_is_cut_off_is_cut_off_in_the_json(schema: Any, text: str, expected: str) -> None:
    assert begun_json(text, declared_types(schema, None)) == expected


@given(st.text() | st.text("0123456789.eE+-[]{}'\":,truefalsN() "), st.lists(st.sampled_from(KINDS)))
def test_any_text_becomes_json_that_every_client_can_read(text: str, kinds: list[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(written(text, {"type": kinds}), parse_constant=refuse)
