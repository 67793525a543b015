"""Owns the contract of the work that a schema makes: what would take llguidance long is refused with the limit.
Never measures time."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.grammars import texts
from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.schema_work import (
    MAX_COMBINED_PATTERN_PROPERTIES,
    MAX_MULTIPLES,
    MAX_PATTERN_PROPERTIES,
)


def named(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^p{number}$": {} for number in range(count)}}


def test_the_limit_of_pattern_properties_is_one_of_the_whole_schema_and_told_with_the_value() -> None:
    """Each is compared with each: 300 took the ingress 25 s, with all other grammars behind it."""
    limit = MAX_PATTERN_PROPERTIES
    assert not find_fault(json_schema(named(limit)).text())
    told = f"at most {limit} patternProperties, but it has {limit + 1}"
    with pytest.raises(GrammarRefused, match=told):
        json_schema(named(limit + 1))
    with pytest.raises(GrammarRefused, match=told):
        json_schema({"properties": {"a": named(limit), "b": named(1)}})
    with pytest.raises(GrammarRefused, match=told):
        texts.grammar("start: %json " + str(named(limit + 1)).replace("'", '"'))


def test_fewer_pattern_properties_are_allowed_where_schemas_are_combined() -> None:
    limit = MAX_COMBINED_PATTERN_PROPERTIES
    assert not find_fault(json_schema({"allOf": [named(limit), {"maxProperties": 3}]}).text())
    assert json_schema({"$ref": "#/$defs/a", "$defs": {"a": named(limit + 1)}, "title": "T"})
    for schema in (
        {"allOf": [named(limit + 1)]},
        {"$ref": "#/$defs/a", "$defs": {"a": named(limit + 1)}, "maxProperties": 3},
        {"anyOf": [named(limit + 1), {}], "type": "object"},
    ):
        with pytest.raises(GrammarRefused, match=f"at most {limit} patternProperties, but it has {limit + 1}"):
            json_schema(schema)


@pytest.mark.parametrize("step", [2, 0.01, 0.25, 1000.0, 1e-7, MAX_MULTIPLES, -3, 19.5])
def test_a_usual_multiple_is_kept(step: Any) -> None:
    assert not find_fault(json_schema({"type": "number", "multipleOf": step}).text())


@pytest.mark.parametrize(
    ("step", "value"), [(MAX_MULTIPLES + 1, 10001), (1000003, 1000003), (268435456, 268435456), (1.00003, 100003)]
)
def test_a_multiple_that_takes_long_is_told_with_the_limit(step: Any, value: int) -> None:
    """1000003 took an engine 24 s and 312 MiB."""
    for schema in ({"multipleOf": step}, {"properties": {"a": {"items": {"multipleOf": step}}}}):
        with pytest.raises(GrammarRefused, match=f"multipleOf, .* at most {MAX_MULTIPLES}, but it is {value}$"):
            json_schema(schema)


def test_multiples_count_together_and_equal_ones_once() -> None:
    steps = [{"type": "integer", "multipleOf": MAX_MULTIPLES - more} for more in (0, 0, 1)]
    assert json_schema({"properties": {"a": steps[0], "b": steps[1]}})
    with pytest.raises(GrammarRefused, match=f"at most {MAX_MULTIPLES} together, but it is {2 * MAX_MULTIPLES - 1}"):
        json_schema({"properties": {"a": steps[0], "b": steps[2]}})


def test_multiples_that_may_hold_for_one_number_count_as_their_common_one() -> None:
    both = [{"type": "number", "multipleOf": 0.02}, {"multipleOf": 5}]
    assert not find_fault(json_schema({"allOf": both}).text())
    large = [{"type": "integer", "multipleOf": 97}, {"multipleOf": 997}]
    assert json_schema({"properties": {"a": large[0], "b": large[1]}})
    for schema in (
        {"allOf": large},
        {"properties": {"a": large[0]}, "patternProperties": {"^a$": large[1]}},
        {"allOf": [{"multipleOf": 1e-9}, {"multipleOf": 9}]},
    ):
        with pytest.raises(GrammarRefused, match=f"at most {MAX_MULTIPLES}, but where several hold for one number"):
            json_schema(schema)
