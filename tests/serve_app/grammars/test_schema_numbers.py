"""Owns the contract of a schema's numbers: an answer has those that the schema admits, or the schema is refused.
Never hands llguidance a number that ends the process."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.grammars import texts
from serve_app.grammars.check import find_fault
from serve_app.grammars.json_schema import json_schema
from serve_app.grammars.notation import GrammarRefused
from serve_app.grammars.tags import Structure, structural_tags
from serve_app.grammars.tool_texts import lark_text
from tests.support.grammar_walks import Walker

WALKER = Walker()
LOWEST = -(2**63)
SNOWFLAKE = 1180293847561029384


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LOWEST},
        {"const": {"a": [LOWEST]}},
        {"enum": [1, -1e30]},
        {"type": "integer", "minimum": -1e30, "maximum": -1e30},
        {"type": "integer", "minimum": LOWEST, "exclusiveMaximum": LOWEST + 1},
        {"type": "integer", "minimum": LOWEST, "maximum": -(10**400)},
        {"allOf": [{"type": "integer", "minimum": -1e30}, {"maximum": -1e30}]},
        {"properties": {"a": {"items": {"const": LOWEST}}}},
        {"components": {"a": {"const": LOWEST}}, "$ref": "#/components/a"},
        {"$defs": {"minimum": -1e30, "maximum": -1e30, "type": "integer"}, "$ref": "#/$defs"},
        {"examples": [{"const": LOWEST}], "$ref": "#/examples/0"},
    ],
    ids=str,
)
def test_a_range_that_ends_the_process_is_refused_before_llguidance_sees_it(schema: Any) -> None:
    """1.9.1 recursed until the stack overflowed: one request ended an ingress replica."""
    with pytest.raises(GrammarRefused, match=r"the schema's \w+ "):
        json_schema(schema)


RULES = [
    'start: %json {"const": -9223372036854775808}',
    'start: "a" // %json\n  %json\n{"type": "integer", "minimum": -1e30, "maximum": -1e30}',
    'start: x\nx: %lark { start: %json {"enum": [-9223372036854775808]} }',
    'start: "\\"" /"/ # "\nx: %json {"const": -9223372036854775808}',
]


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("read", [texts.grammar, lark_text])
def test_such_a_range_inside_a_clients_lark_is_refused_too(read: Any, text: str) -> None:
    with pytest.raises(GrammarRefused, match=r"the schema's (const|enum|maximum) "):
        read(text)


def test_such_a_range_inside_a_structural_tag_is_refused_at_its_place() -> None:
    with pytest.raises(GrammarRefused, match="the schema's const has -9223372036854775808") as refused:
        structural_tags([Structure("<a>", {"const": LOWEST}, "</a>")], ["<a>"], {})
    assert refused.value.place == "structures.0.schema"


@pytest.mark.parametrize(
    "listed",
    [SNOWFLAKE, 2**64 - 1, 2**53 + 1, -(2**53) - 1, 1e21, -1e21, 2.0**63],
)
@pytest.mark.parametrize("kind", [{}, {"type": ["string", "integer"]}])
def test_a_constant_that_would_become_another_number_is_refused_with_its_digits(listed: Any, kind: Any) -> None:
    """1180293847561029384 became 1180293847561029376, and 1e21 the last integer of 64 bits."""
    for schema in ({"const": listed}, {"enum": [5, listed]}, {"const": {"a": [listed]}}):
        with pytest.raises(GrammarRefused) as refused:
            json_schema(schema | kind)
        assert f"has {listed}, which cannot be kept exactly" in refused.value.text


@pytest.mark.parametrize(
    "listed", [0, -1, 1.5, 2**53, -(2**62), 2**63 - 1, 2**63 - 1024, 1024 - 2**63, 1e15, 1e18, -9.223372036854775e18]
)
def test_a_constant_that_can_be_kept_is_the_only_answer(listed: Any) -> None:
    for kind in ({}, {"type": "number"}, {"type": "integer"} if listed != 1.5 else {}):
        schema = json_schema(kind | {"const": listed}).text()
        written = str(int(listed) if listed == int(listed) else listed)
        assert not find_fault(schema)
        assert WALKER.walk(schema, 1) == written
        assert not WALKER.admits(schema, str(int(listed) + 1))


INT64 = {"minimum": LOWEST, "maximum": 2**63 - 1}
FLOAT32 = 3.4028234663852886e38
FLOAT64 = 1.7976931348623157e308


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        ({"type": "integer", **INT64}, ["0", str(2**63 - 1), str(1024 - 2**63)], [str(2**63), str(LOWEST - 1), "0.5"]),
        ({"type": ["integer", "null"], **INT64}, ["0", "null", str(2**63 - 1)], [str(2**63), str(LOWEST - 1)]),
        ({"type": "integer", "minimum": LOWEST}, ["-5", "5"], [str(LOWEST - 1)]),
        ({"type": "integer", "minimum": LOWEST, "maximum": 7}, ["-5", "7"], ["8", str(LOWEST - 1)]),
        ({"type": "integer", "exclusiveMaximum": 2**63}, ["-5", str(2**63 - 1)], [str(2**63)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["-1", str(2**64)]),
        ({"type": "integer", "minimum": -(10**30), "maximum": 10**30}, ["-5", "5"], []),
        ({"type": "integer", "minimum": 10**18}, [str(10**18), str(2**63 - 1)], ["5", str(10**18 - 1)]),
        ({"type": "integer", "maximum": -(10**18)}, [str(-(10**18))], ["5", str(1 - 10**18)]),
        ({"type": "number", **INT64}, ["0.5", "-3"], [str(2**63), str(LOWEST - 1)]),
        ({"type": "number", "minimum": -FLOAT32, "maximum": FLOAT32}, ["0.5", "-3"], ["1e39", "-1e39"]),
        ({"type": "number", "minimum": -FLOAT64, "maximum": FLOAT64}, ["0.5", "-3", "1e39"], []),
        ({"type": "number", "minimum": 0, "maximum": FLOAT64}, ["0.5", "0"], ["-3"]),
    ],
    ids=str,
)
def test_the_bounds_of_code_generators_are_kept(schema: Any, admitted: list[str], refused: list[str]) -> None:
    """llguidance refuses them with words of its own, and with them the whole request."""
    grammar = json_schema(schema).text()
    assert not find_fault(grammar)
    assert [text for text in admitted if not WALKER.admits(grammar, text)] == []
    assert [text for text in refused if WALKER.admits(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "outside"),
    [
        ({"minimum": 2**53 + 1}, 2**53),
        ({"exclusiveMinimum": 2**53}, 2**53),
        ({"exclusiveMinimum": 2**53 + 1}, 2**53 + 1),
        ({"minimum": 2**53, "exclusiveMinimum": True}, 2**53),
        ({"minimum": 0, "exclusiveMinimum": 2**60}, 2**60),
        ({"maximum": -(2**53) - 1}, -(2**53)),
        ({"exclusiveMaximum": -(2**53)}, -(2**53)),
        ({"maximum": 2**53 + 1}, 2**53 + 2),
    ],
    ids=str,
)
def test_a_bound_that_no_double_holds_admits_nothing_outside(schema: Any, outside: int) -> None:
    grammar = json_schema({"type": "integer"} | schema).text()
    inside = outside + (4096 if "maximum" not in schema and "exclusiveMaximum" not in schema else -4096)
    assert WALKER.admits(grammar, str(inside))
    assert not WALKER.admits(grammar, str(outside))


@pytest.mark.parametrize("bound", [{"minimum": 2.0**63}, {"minimum": 10**400}, {"exclusiveMinimum": 1e308}])
def test_a_bound_beyond_what_can_be_written_is_told_with_the_limit(bound: Any) -> None:
    ((name, value),) = bound.items()
    told = rf"the schema's {name} should be at most 9223372036854774784, but it is {str(value)[:50]}".replace(
        "+", r"\+"
    )
    with pytest.raises(GrammarRefused, match=told):
        json_schema({"type": "number"} | bound)


@pytest.mark.parametrize(
    ("schema", "outside", "inside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0", "-0", "0.6"], ["0.1", "0.5", "0.01", "0.000001"]),
        ({"exclusiveMinimum": 2, "maximum": 2.5}, ["2", "2.0", "2.6"], ["2.1", "2.5", "2.01"]),
        ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, ["2", "2.0"], ["2.1", "2.5"]),
        ({"minimum": -3.5, "exclusiveMaximum": -3}, ["-3", "-3.0", "-3.6"], ["-3.1", "-3.5", "-3.01"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1", "-1.0"], ["-1.1", "-1.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["0", "-0", "-0.0"], ["-0.1", "-0.5", "-0.01"]),
        ({"allOf": [{"exclusiveMinimum": 0, "type": "number"}, {"maximum": 0.5}]}, ["0"], ["0.1", "0.5"]),
        ({"exclusiveMinimum": -1, "maximum": -0.5}, ["-1", "-0.4"], ["-0.9", "-0.99"]),
        ({"exclusiveMinimum": 0}, ["0", "0.0"], ["0.1", "5"]),
    ],
    ids=str,
)
def test_an_exclusive_bound_is_excluded_also_beside_a_fraction(schema: Any, outside: Any, inside: Any) -> None:
    """0 was admitted as more than 0 and at most 0.5."""
    grammar = json_schema({"type": "number"} | schema).text()
    assert [text for text in outside if WALKER.admits(grammar, text)] == []
    assert [text for text in inside if not WALKER.admits(grammar, text)] == []
