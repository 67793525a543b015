"""Owns the contract of answers in JSON: what a schema's grammar admits is JSON on one line that the schema allows.
Never tests how llguidance reads a single keyword: random schemas, with an independent validator, do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import (
    MAX_NESTING,
    MAX_SCHEMA_BYTES,
    any_object,
    json_schema,
    read_schema,
)
from serve_app.grammars.notation import GrammarRefused
from tests.support.grammar_walks import Walker
from tests.support.json_schemas import random_schema

WALKER = Walker()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_every_text_that_a_random_schema_admits_parses_and_is_valid(start: int) -> None:
    for seed in range(start, start + 20):
        schema = random_schema(seed)
        grammar = json_schema(schema).text()
        assert not find_fault(grammar), schema
        for number in range(2):
            text = WALKER.walk(grammar, (seed, number))
            value = json.loads(text)
            Draft202012Validator(schema).validate(value)
            assert "\n" not in text, text


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "ä\n": {"type": "integer"}}, "required": ["a"]}
PATTERNED = {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}}
MERGED = {"$defs": {"one": OPEN}, "type": "object", "properties": {"in": {"allOf": [{"$ref": "#/$defs/one"}]}}}
ELSEWHERE = {"components": {"one": OPEN}, "$ref": "#/components/one"}


@pytest.mark.parametrize(
    ("schema", "text", "is_admitted"),
    [
        (OPEN, r'{"a": 1, "\u0061": "x"}', False),
        (OPEN, r'{"a": 1, "\u0061b": "x"}', False),
        (OPEN, r'{"a": 1, "\u00e4\n": "x"}', False),
        (OPEN, r'{"a": 1, "ä\u000a": "x"}', False),
        (OPEN, r'{"a": 1, "ä\n": 2}', True),
        (OPEN, r'{"a": 1, "ä\n": "x"}', False),
        (OPEN, r'{"a": 1, "b\n\"\\ é": "x\t"}', True),
        (OPEN, r'{"a": 1, "b": "\u001b"}', False),
        (PATTERNED, r'{"x_1": 1, "\u0078_1": "a"}', False),
        (PATTERNED, r'{"x_1": 1, "y": "a"}', True),
        (MERGED, r'{"in": {"a": 1, "\u0061": "x"}}', False),
        (MERGED, r'{"in": {"a": 1, "b": "x"}}', True),
        (ELSEWHERE, r'{"a": 1, "\u0061": "x"}', False),
        (ELSEWHERE, r'{"a": 1, "b": "x"}', True),
        ({"type": "object", "required": ["a"]}, r'{"a": 1, "\u0061": 2}', False),
        ({"anyOf": [OPEN, {"type": "null"}]}, r'{"a": 1, "\u0061": "x"}', False),
        ({"type": "array", "items": OPEN}, r'[{"a": 1, "\u0061": "x"}]', False),
        (PERSON, r'{"name": "\u001b[1m", "age": 3}', True),
        ({"type": "object"}, r'{"b": "\u001b[1m"}', True),
        ({"type": "object", "additionalProperties": {"type": "string"}}, r'{"b": "\u001b"}', True),
    ],
)
def test_a_key_that_a_schema_names_is_written_in_one_way_only(schema: Any, text: str, is_admitted: bool) -> None:
    r"""`\u0061` was allowed as a second key besides `a`: a parser keeps the last, which may be of another type."""
    assert WALKER.admits(json_schema(schema).text(), text) is is_admitted


NAMED_SO = {"title": {"type": "integer"}, "description": {"type": "object", "properties": {"default": {"const": 1}}}}


def test_annotations_are_not_written_and_what_is_only_named_so_is() -> None:
    """They make up most of a tool's schema, and llguidance ignores them."""
    closed = {"type": "object", "additionalProperties": False, "required": ["title", "description"]}
    schema = closed | {"properties": NAMED_SO, "title": "T", "description": "D", "examples": [{"title": "E"}]}
    (entry,) = json_schema(schema).entries
    assert entry["json_schema"].keys() == {"type", "additionalProperties", "required", "properties", "x-guidance"}
    assert entry["json_schema"]["properties"] == NAMED_SO
    assert WALKER.admits(json_schema(schema).text(), '{"title": 3, "description": {"default": 1}}')


@pytest.mark.parametrize("word", ["anyOf", "allOf"])
def test_annotations_inside_a_list_of_schemas_are_not_written(word: str) -> None:
    (entry,) = json_schema({word: [{"const": 1, "title": "T", "default": {"title": 1}}]}).entries
    assert entry["json_schema"][word] == [{"const": 1}]


def test_an_annotation_that_a_reference_leads_into_stays() -> None:
    schema = {"$ref": "#/examples/0", "examples": [{"type": "integer", "title": "T"}]}
    assert WALKER.admits(json_schema(schema).text(), "3")


@pytest.mark.parametrize("listed", [{"const": "\x1b"}, {"enum": ["a", {"b": ["\x7f"]}]}, {"const": {"\x00": 1}}])
def test_a_schema_that_only_codes_could_write_is_refused_where_they_could_write_a_key_twice(listed: Any) -> None:
    closed = {"type": "object", "properties": {"a": listed}, "additionalProperties": False}
    assert not find_fault(json_schema(closed).text())
    with pytest.raises(GrammarRefused, match=r"`additionalProperties: false` .* control characters"):
        json_schema(closed | {"additionalProperties": True})


@pytest.mark.parametrize(
    ("text", "is_admitted"),
    [
        ('{"name": "Ann", "age": 3}', True),
        ('{"name": "Ann \\"B\\" 🦜", "age": 0}', True),
        ('{"name":"Ann","age":3}', False),
        ('{ "name": "Ann", "age": 3}', False),
        ('{"name": "Ann", "age": 3}\n', False),
        ('{"age": 3, "name": "Ann"}', False),
        ('{"name": "Ann"}', False),
        ('{"name": "", "age": 3}', False),
        ('{"name": "Ann", "age": -1}', False),
        ('{"name": "Ann", "age": 3, "x": 1}', False),
        ('Sure: {"name": "Ann", "age": 3}', False),
    ],
)
def test_json_is_as_the_schema_says_in_the_schemas_order_and_without_free_white_space(
    text: str, is_admitted: bool
) -> None:
    assert WALKER.admits(json_schema(PERSON).text(), text) is is_admitted


@pytest.mark.parametrize(
    ("text", "is_admitted"),
    [("{}", True), ('{"a": [1, {"b": null}]}', True), ("[]", False), ('"a"', False), ("{} ", False)],
)
def test_any_object_is_any_object(text: str, is_admitted: bool) -> None:
    assert WALKER.admits(any_object().text(), text) is is_admitted


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True, "contains": {}}, '"contains", "uniqueItems"'),
        ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, '"if", "then"'),
        ({"type": "str"}, "Invalid type: str"),
        ({"type": "string", "format": "idn-email"}, "Unknown format: idn-email"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, '"propertyNames"'),
        ({"type": "object", "propertyNames": {"type": "string", "minLength": 1}}, '"propertyNames"'),
        ({"type": "object", "propertyNames": False}, '"propertyNames"'),
        ({"type": "object", "propertyNames": {"type": "number"}}, '"propertyNames"'),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
        ({"type": "object", "unevaluatedProperties": False}, '"unevaluatedProperties"'),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#/$defs/a"}, "does not exist"),
        ({"$ref": "https://example.org/a.json"}, "not present"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_told_by_its_name(schema: dict[str, Any], told: str) -> None:
    fault = find_fault(json_schema(schema).text())
    assert all(part in fault for part in told.split(", "))
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("kind", "idle"),
    [
        *(("string", {"format": name}) for name in ("path", "uuid4", "password", "binary", "base64", "colour")),
        *(("object", {"propertyNames": names}) for names in (True, {}, {"type": "string", "description": "a key"})),
        ("object", {"dependentRequired": {}, "dependentSchemas": {}, "unevaluatedProperties": True}),
        ("array", {"uniqueItems": False, "unevaluatedItems": {}}),
    ],
    ids=str,
)
def test_a_keyword_that_constrains_nothing_is_not_refused(kind: str, idle: dict[str, Any]) -> None:
    """pydantic, Zod and OpenAPI write them, and the whole request was refused."""
    closed = {"type": "object", "required": ["a"], "additionalProperties": False}
    for schema in ({"type": kind}, closed | {"properties": {"a": {"anyOf": [{"type": kind}]}}}):
        told = json.loads(
            json.dumps(schema).replace(f'"type": "{kind}"', f'"type": "{kind}", {json.dumps(idle)[1:-1]}')
        )
        assert json_schema(told).text() == json_schema(schema).text()


def test_a_property_with_the_name_of_an_idle_keyword_stays() -> None:
    named = {"format": {"const": "colour"}, "uniqueItems": {"const": False}}
    schema = {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}
    (entry,) = json_schema(schema).entries
    assert entry["json_schema"]["properties"] == named
    assert WALKER.admits(json_schema(schema).text(), '{"format": "colour", "uniqueItems": false}')


@pytest.mark.parametrize("place", ["properties", "$defs", "patternProperties"])
def test_a_keyword_that_would_be_ignored_is_refused_wherever_it_is_and_a_property_of_that_name_is_not(
    place: str,
) -> None:
    assert json_schema({"type": "object", place: {"nullable": {"type": "string"}}})
    with pytest.raises(GrammarRefused, match="'nullable' is not supported"):
        json_schema({"type": "object", place: {"a": {"anyOf": [{"type": "string", "nullable": True}]}}})


def test_a_reference_without_a_fragments_mark_is_read_as_one() -> None:
    """litellm writes such references for a schema with nested models."""
    note = {"type": "object", "properties": {"line": {"type": "integer"}}, "required": ["line"]}
    note |= {"additionalProperties": False}
    schema = {"type": "object", "properties": {"note": {"$ref": "/$defs/Note"}}, "required": ["note"]}
    schema |= {"additionalProperties": False, "$defs": {"Note": note}}
    grammar = json_schema(schema).text()
    assert not find_fault(grammar)
    assert WALKER.admits(grammar, '{"note": {"line": 1}}')
    assert not WALKER.admits(grammar, '{"note": {"line": "1"}}')
    assert schema["properties"] == {"note": {"$ref": "/$defs/Note"}}, "the client's own is as it was"


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"minProperties": 2}, 1),
        ({"minProperties": 3, "required": ["a"]}, 2),
        ({"minProperties": 2, "additionalProperties": False, "patternProperties": {"^a": {}}}, 1),
        ({"anyOf": [{"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}]}, 1),
    ],
)
def test_a_count_of_properties_that_one_key_written_twice_would_meet_is_refused(schema: Any, most: int) -> None:
    with pytest.raises(GrammarRefused, match=f"minProperties should be at most {most}, .* but it is {most + 1}"):
        json_schema(schema)


def test_a_count_of_properties_that_differ_is_kept() -> None:
    assert not WALKER.admits(json_schema({"type": "object", "minProperties": 1}).text(), "{}")
    grammar = json_schema({"type": "object", "minProperties": 2, "required": ["a"]}).text()
    assert WALKER.admits(grammar, '{"a": 1, "b": 1}')
    assert not WALKER.admits(grammar, '{"a": 1}')
    assert not WALKER.admits(grammar, '{"a": 1, "a": 1}')
    closed = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    assert WALKER.admits(json_schema(closed | {"type": "object", "minProperties": 2}).text(), '{"a": 1, "b": 1}')


def test_a_schema_on_which_llguidance_panics_is_a_fault_like_any_other() -> None:
    """1.9.1 cuts its message at a byte, which may be inside a character: a PanicException, not an Exception."""
    assert find_fault(json_schema({"properties": {"a": ["🔑" * 300]}}).text())


def test_a_client_cannot_set_llguidances_own_options() -> None:
    with pytest.raises(GrammarRefused, match="'x-guidance' is not supported"):
        json_schema({"type": "object", "x-guidance": {"lenient": True}})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range((depth - 1) // 2):
        schema = {"properties": {"a": schema}}
    return schema


def test_the_limits_are_told_with_the_value() -> None:
    assert json_schema(nested(MAX_NESTING - 1))
    with pytest.raises(GrammarRefused, match=f"at most {MAX_NESTING} deep"):
        json_schema(nested(MAX_NESTING + 1))
    assert json_schema({"description": "x" * (MAX_SCHEMA_BYTES - 20)})
    with pytest.raises(GrammarRefused, match=f"at most {MAX_SCHEMA_BYTES} bytes, but it has {MAX_SCHEMA_BYTES + 1}"):
        json_schema({"description": "x" * (MAX_SCHEMA_BYTES - 18)})


@pytest.mark.parametrize("text", ["{", "[]", "1", "", '"a"', "[" * 100_000])
def test_a_schema_as_text_must_be_an_object(text: str) -> None:
    with pytest.raises(GrammarRefused, match="should"):
        read_schema(text)
