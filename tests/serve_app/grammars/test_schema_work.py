"""Owns the contract of the work that a schema makes: what would take llguidance long is refused with the limit.
Never measures time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.grammars import texts
from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.schema_work import (
    MAX_COMBINED_PATTERN_PAIRS,
    MAX_COMBINED_PATTERN_PROPERTIES,
    MAX_MULTIPLE,
    MAX_MULTIPLES,
    MAX_PATTERN_PAIRS,
    MAX_PATTERN_PROPERTIES,
    _check_common,
    check_tools,
)


def named(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^p{number}$": {} for number in range(count)}}


def test_the_limit_of_pattern_properties_is_one_of_each_object_and_told_with_the_value() -> None:
    """Each is compared with each: 300 took the ingress 25 s, with all other grammars behind it."""
    limit = MAX_PATTERN_PROPERTIES
    assert not find_fault(json_schema(named(limit)).text())
    assert json_schema({"properties": {"a": named(limit), "b": named(limit)}})
    told = f"at most {limit} patternProperties, but one has {limit + 1}"
    with pytest.raises(GrammarRefused, match=told):
        json_schema({"properties": {"a": named(1), "b": named(limit + 1)}})
    with pytest.raises(GrammarRefused, match=told):
        texts.grammar("start: %json " + str(named(limit + 1)).replace("'", '"'))


def test_the_pairs_of_pattern_properties_have_a_limit_over_all_objects() -> None:
    many = {"properties": {str(number): named(50) for number in range(9)}}
    with pytest.raises(GrammarRefused, match=f"at most {MAX_PATTERN_PAIRS} over all objects, but they add up to 22500"):
        json_schema(many)
    both = " ".join("%json " + str({"properties": {"a": named(60)}}).replace("'", '"') for _ in range(6))
    with pytest.raises(GrammarRefused, match="add up to 21600"):
        texts.grammar(f"start: {both}")


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (r"^[a-z]{1,300}%d$", 23),
        (r"^[a-z]{300,}%d$", 23),
        (r"^[a-z]{,00300}%d$", 23),
        (r"^(a{9}){99}%d$", 23),
        ("^" + "a" * 300 + "%d$", 23),
        (r"^[a-z0-9]{1,8}-%d$", 64),
        (r"^[a-z]{1,64}%d$", 50),
        (r"^\d{4}-\d{2}-\d{2}x%d$", 64),
        (r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-%d$", 63),
        (r"^[a-z]{1,20}\.[a-z]{1,20}-%d$", 53),
        (r"^[a-z]{1,20}a[a-z]{1,20}%d$", 23),
        (r"^[a-z.]{1,20}\.[a-z]{1,20}%d$", 23),
        (r"^[a-z]*a[a-z]{20}%d$", 23),
        (r"^[a-z]*-?a[a-z]{20}%d$", 23),
        (r"a[a-z]{20}%d$", 28),
        (r"^a|[a-z]{20}%d$", 26),
        (r"^(?:a?b?c?){20}%d$", 23),
        (r"^a?b?c?d?e?[a-e]{20}%d$", 35),
        (r"^a{9}{99}%d$", 23),
        (r"^.{20}a%d$", 32),
        (r"^\u{300}[{9}]\{9\}%d$", 64),
        (r"^[a-z_]{1,2}%d$", 64),
        (r"^x-[0-9]*%d$", 64),
    ],
)
def test_long_pattern_properties_and_ones_with_counts_count_for_more(pattern: str, most: int) -> None:
    """Regression: 64 such as `^[a-z]{1,300}0$`, in 1.6 kB, took 1.7 s, and four such objects seven."""
    schemas = [{"patternProperties": {pattern % number: {} for number in range(count)}} for count in (most, most + 1)]
    assert json_schema(schemas[0])
    with pytest.raises(GrammarRefused, match=r"compare patternProperties .* at most 20000 steps|at most 64 pattern"):
        json_schema(schemas[1])
    alone = {"properties": {str(number): {"patternProperties": {pattern % 1: {}}} for number in range(100)}}
    assert json_schema(alone), "nothing is compared with it"


@pytest.mark.parametrize("pattern", [r"^%s\d{4}-\d{2}-\d{2}$", r"^%s_[0-9a-f]{8}-[0-9a-f]{4}$", "^%s[A-Z0-9_]{1,64}$"])
def test_usual_patterns_with_counts_are_kept(pattern: str) -> None:
    """Regression: counts side by side multiplied each other, so a date counted as the largest pattern. llguidance takes
    a few milliseconds."""

    def of(names: str) -> dict[str, Any]:
        return {"type": "object", "patternProperties": {pattern % name: {} for name in names}}

    assert not find_fault(json_schema(of("abcdefghijklmnopqrstuvwxyzABCDEF")).text())
    assert not find_fault(json_schema({"allOf": [of("abcdefgh"), {"type": "object"}]}).text())
    check_tools([of("abcdef")] * 16)


S = {"type": "string"}
OTHER = {"type": "object", "properties": {"a": S, "b": S}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
REFERENCE = {"properties": {"k": {"const": "a", "type": "string"}}, "required": ["k"]}


@pytest.mark.parametrize(
    "properties",
    [
        {**{str(number): {"type": "object", "patternProperties": {"^x-": S}} for number in range(9)}, "o": OTHER},
        {**{str(number): {"type": "object", "patternProperties": {"^x-": S}} for number in range(100)}, "o": OTHER},
        {
            **{str(number): {"type": "object", "patternProperties": {"^(.*)$": S}} for number in range(9)},
            "o": {"allOf": [{"type": "object", "properties": {"a": S}}, {"type": "object", "properties": {"b": S}}]},
        },
        {
            "a": named(9),
            "p": {"discriminator": {"propertyName": "k"}, "oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
        },
    ],
    ids=["openapi", "100 objects", "typebox", "pydantic"],
)
def test_usual_schemas_with_one_pattern_in_many_objects_are_kept(properties: dict[str, Any]) -> None:
    """They took a few milliseconds, and were refused for an unrelated combination."""
    schema = {"type": "object", "properties": properties, "$defs": {"A": {"type": "object"} | REFERENCE}}
    assert json_schema(schema)


def test_the_same_patterns_in_many_combined_objects_have_a_limit() -> None:
    """Two lists of 30 with 8 each took 0.3 s, ten times as long as without."""
    several = [named(8) | {"maxProperties": number} for number in range(9, 39)]
    with pytest.raises(GrammarRefused, match=f"at most {MAX_COMBINED_PATTERN_PAIRS} over all objects .* to 1920"):
        json_schema({"allOf": [{"type": "object"}, {"anyOf": several}]})


def test_fewer_pattern_properties_are_allowed_where_schemas_are_combined() -> None:
    limit = MAX_COMBINED_PATTERN_PROPERTIES
    assert not find_fault(json_schema({"allOf": [named(limit), {"maxProperties": 3}]}).text())
    assert json_schema({"$ref": "#/$defs/a", "$defs": {"a": named(limit + 1)}, "title": "T"})
    for schema in (
        {"allOf": [named(limit + 1)]},
        {"$ref": "#/$defs/a", "$defs": {"a": named(limit + 1)}, "maxProperties": 3},
        {"anyOf": [named(limit + 1), {}], "type": "object"},
        {"allOf": [{"properties": {"a": {"items": {"$ref": "#/$defs/a"}}}}], "$defs": {"a": named(limit + 1)}},
        {"allOf": [{"$ref": "#/properties/a"}], "properties": {"a": named(limit + 1)}},
    ):
        with pytest.raises(
            GrammarRefused, match=f"at most {limit} different patternProperties there, but it has {limit + 1}"
        ):
            json_schema(schema)


@pytest.mark.parametrize("step", [2, 0.01, 0.25, 1000.0, 1e-7, MAX_MULTIPLES, 20_000, MAX_MULTIPLE, -3, 19.5])
def test_a_usual_multiple_is_kept(step: Any) -> None:
    assert not find_fault(json_schema({"type": "number", "multipleOf": step}).text())


@pytest.mark.parametrize(
    ("step", "value"), [(MAX_MULTIPLE + 1, 65537), (1000003, 1000003), (268435456, 268435456), (1.00003, 100003)]
)
def test_a_multiple_that_takes_long_is_told_with_the_limit(step: Any, value: int) -> None:
    """1000003 took an engine 24 s and 312 MiB."""
    for schema in ({"multipleOf": step}, {"properties": {"a": {"items": {"multipleOf": step}}}}):
        with pytest.raises(GrammarRefused, match=f"multipleOf, .* at most {MAX_MULTIPLE}, but it is {value}$"):
            json_schema(schema)


@pytest.mark.parametrize("digits", [309, 310, 4300])
def test_a_multiple_beyond_any_float_is_refused_by_its_limit(digits: int) -> None:
    """Regression: it was answered by a 500, as are two that only together have more digits than Python writes."""
    step = 10**digits - 1
    told = "far larger" if digits > 400 else str(step)
    with pytest.raises(GrammarRefused, match=f"multipleOf, .* at most {MAX_MULTIPLE}, but it is {told}$"):
        json_schema({"multipleOf": step})
    with pytest.raises(GrammarRefused, match=f"multipleOf, .* at most {MAX_MULTIPLES} together, but it is"):
        json_schema({"properties": {"a": {"multipleOf": step}, "b": {"multipleOf": step - 2}}})


class Counted(int):
    """Counts its multiplications."""

    num = 0

    def __rmul__(self, other: int) -> int:
        Counted.num += 1
        return int(other) * int(self)

    def __mul__(self, other: int) -> Counted:
        return Counted(int(self) * int(other))


def test_the_product_of_many_multiples_is_not_computed_to_its_end() -> None:
    """Regression: 50 kB of them held the interpreter for 0.6 s, for a number of a million bits."""
    with pytest.raises(GrammarRefused, match="product"):
        _check_common([(Counted(5000), 0)] * 2000)
    assert Counted.num == 3


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
        {
            "anyOf": [{"properties": {"a": {"$ref": "#/$defs/a"}}}],
            "properties": {"a": large[1]},
            "$defs": {"a": large[0]},
        },
        {"$ref": "#/$defs/a", "properties": {"a": large[1]}, "$defs": {"a": {"properties": {"a": large[0]}}}},
    ):
        with pytest.raises(GrammarRefused, match=f"at most {MAX_MULTIPLES}, but where several hold .* may be 96709$"):
            json_schema(schema)
    with pytest.raises(GrammarRefused, match=r"with 9 decimal places .* less than 4294967296, but it is larger$"):
        json_schema({"allOf": [{"multipleOf": 1e-9}, {"multipleOf": 9}]})
    steps = (1e-300, *(2**bit for bit in range(9)), 10, 20, 40, 50, 80, 100)
    with pytest.raises(GrammarRefused, match=r"with 300 decimal places"):
        json_schema({"allOf": [{"multipleOf": step} for step in steps]})


def test_multiples_that_never_hold_for_one_number_are_kept_beside_a_combination() -> None:
    steps = {"price": 0.01, "qty": 5, "step": 10, "pack": 100, "a": 60, "b": 64, "c": 997}
    numbers = {name: {"type": "number", "multipleOf": step} for name, step in steps.items()}
    required = [{"required": ["price"]}, {"required": ["pack"]}]
    assert not find_fault(json_schema({"type": "object", "properties": numbers, "anyOf": required}).text())
    other: dict[str, Any] = {"properties": {"u": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$defs": {"A": OTHER}}
    listed = {name: {"type": "array", "items": number} for name, number in numbers.items()}
    assert json_schema(other | {"properties": listed | other["properties"]})


def test_a_multiple_beside_a_bound_has_the_limit_of_several() -> None:
    """An engine refused it without a name."""
    with pytest.raises(GrammarRefused, match=f"at most {MAX_MULTIPLES} beside a minimum or maximum, but it is 20011$"):
        json_schema({"type": "integer", "multipleOf": 20011, "minimum": 1000})


def test_the_annotations_of_a_schema_inside_lark_make_no_work() -> None:
    large = {"const": 2**60 + 1, "multipleOf": 10**6}
    text = json.dumps(
        {"type": "object", "properties": {"a": {"type": "string", "default": large}}, "examples": [large]}
    )
    assert not find_fault(texts.grammar(f"start: %json {text}").text())
    with pytest.raises(GrammarRefused, match="multipleOf"):
        texts.grammar(f'start: %json {{"properties": {{"default": {json.dumps({"multipleOf": 10**6})}}}}}')
