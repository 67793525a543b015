"""Owns the limits on the work that a JSON schema makes for llguidance, which nothing interrupts.
Never measures time: what is refused is the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, TypeAlias

from serve_app.grammars.notation import GrammarRefused, Json
from serve_app.grammars.pattern_size import size_of
from serve_app.grammars.schema_parts import UNWRITTEN, dicts

_Decimal: TypeAlias = tuple[int, int]
"""Digits, and how many of them are behind the point."""

MAX_PATTERN_PROPERTIES = 64
"""Limits those of one object. llguidance compares each with each other one: 64 take 20 ms, 300 take 20 s."""
MAX_PATTERN_PAIRS = 20_000
"""Limits the sum of the squares of all objects' numbers of them: 20,000 take 100 ms."""
_SHORT, _PER_STEP = 16, 8
"""Up to so many characters a pattern is short, and so many more take as long again: 64 such as `^[a-z]{1,300}0$`
took 1.7 s instead of 20 ms."""
MAX_COMBINED_PATTERN_PROPERTIES = 8
"""Limits the different ones where `allOf` and the like may compare them thousands of times."""
MAX_COMBINED_PATTERN_PAIRS = 1000
"""Limits the sum of their squares there: three lists of 13 objects with 5 each take 0.5 s, and 0.15 s without any."""
_COMBINED = " with allOf, or with $ref, anyOf or oneOf beside other keywords,"
MAX_MULTIPLE = 2**16
"""Limits a single `multipleOf`, without its decimal point. Its states are as many: 65,521 takes 300 ms, a million takes
24 s and 312 MiB."""
MAX_MULTIPLES = 10_000
"""Limits the sum of several, because a number may have to be compared with each, and one beside another bound."""
_TOO_LONG_TO_TELL = 10**400
"""Python writes no number of more than 4,300 digits."""
_MAX_PRODUCT = 2**32
"""llguidance multiplies them in 32 bits where it combines them."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DEFINITIONS = ("$defs", "definitions")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_Reached: TypeAlias = tuple[str | None, Json]
"""A schema, and the name of the property that it is for, if that is known."""


def check_work(schema: Any) -> None:
    """
    Raises:
        GrammarRefused: the schema has too many `patternProperties`, or a `multipleOf` that is too large.
    """
    parts = list(dicts(schema))
    _check_patterns(parts, MAX_PATTERN_PAIRS, ",")
    _check_multiples(parts)
    for root in schema if isinstance(schema, list) else (schema,):
        combined = [part for part in dicts(root) if _is_combined(part)]
        if combined:
            _check_combined_patterns(_reached(root, combined))
        combined += (part for part in dicts(root) if "patternProperties" in part and "properties" in part)
        if combined:
            _check_combined_multiples(_reached(root, combined))


def check_tools(schemas: Iterable[Any]) -> None:
    """Check the schemas of one request's tools together: each is compiled, one after the other, in one turn of its
    tenant.

    Raises:
        GrammarRefused: they have too many `patternProperties`.
    """
    _check_patterns((part for schema in schemas for part in dicts(schema)), MAX_PATTERN_PAIRS, " of all tools,")


def _check_patterns(parts: Iterable[Json], limit: int, where: str) -> None:
    objects = [patterns for part in parts if isinstance(patterns := part.get("patternProperties"), dict)]
    counts = list(map(len, objects))
    if (most := max(counts, default=0)) > MAX_PATTERN_PROPERTIES:
        told = f"an object of the schema should have at most {MAX_PATTERN_PROPERTIES} patternProperties"
        raise GrammarRefused(f"{told}, but one has {most}")
    if (pairs := sum(count**2 for count in counts)) > limit:
        told = f"the squares of the numbers of patternProperties should add up to at most {limit}"
        raise GrammarRefused(f"{told} over all objects{where} but they add up to {pairs}")
    if (steps := sum(len(patterns) * sum(map(_weight, patterns)) for patterns in objects if len(patterns) > 1)) > limit:
        told = "to compare patternProperties with others of their object, where long ones and large counts take longer,"
        raise GrammarRefused(f"{told} should take at most {limit} steps over all objects{where} but it takes {steps}")


def _weight(pattern: str) -> int:
    """Return how many short patterns take as long to be compared with others as this one, as a rule."""
    return 1 + max(size_of(pattern) - _SHORT, 0) // _PER_STEP


def _check_combined_patterns(reached: Iterable[_Reached]) -> None:
    parts = {id(part): part for _, part in reached}.values()
    named = [part.get("patternProperties") for part in parts]
    count = len({pattern for patterns in named if isinstance(patterns, dict) for pattern in patterns})
    if count > MAX_COMBINED_PATTERN_PROPERTIES:
        limit = MAX_COMBINED_PATTERN_PROPERTIES
        told = f"a schema{_COMBINED} should have at most {limit} different patternProperties there"
        raise GrammarRefused(f"{told}, but it has {count}")
    _check_patterns(parts, MAX_COMBINED_PATTERN_PAIRS, _COMBINED)


def _check_multiples(parts: Iterable[Json]) -> None:
    stepped = [(step, part) for part in parts if (step := _decimal(part.get("multipleOf"))) is not None]
    steps = {step for step, _ in stepped}
    total = sum(digits for digits, _ in steps)
    is_plain = len(steps) == 1 and not any(name in part for _, part in stepped for name in _BOUNDS)
    limit = MAX_MULTIPLE if is_plain else MAX_MULTIPLES
    if total > limit:
        where = " together" if len(steps) > 1 else "" if is_plain else " beside a minimum or maximum"
        told = f"the schema's multipleOf, without decimal points, should be at most {limit}"
        is_long = total >= _TOO_LONG_TO_TELL
        raise GrammarRefused(f"{told}{where}, but it is {'far larger' if is_long else total}")


def _check_combined_multiples(reached: Iterable[_Reached]) -> None:
    groups: dict[str | None, set[_Decimal]] = {None: set()}
    for name, part in reached:
        if (step := _decimal(part.get("multipleOf"))) is not None:
            groups.setdefault(name, set()).add(step)
    for group in groups.values():
        if len(found := sorted(group | groups[None])) > 1:
            _check_common(found)


def _check_common(found: list[_Decimal]) -> None:
    most = max(places for _, places in found)
    digits = [digits * 10 ** (most - places) for digits, places in found]
    common, _ = _reduced(math.lcm(*digits), most)
    if common > MAX_MULTIPLES:
        told = f"the schema's multipleOf, without decimal points, should be at most {MAX_MULTIPLES}"
        raise GrammarRefused(f"{told}, but where several hold for one number it may be {common}")
    product = 1
    for one in digits:  # ends early: of thousands it would have a million digits
        if (product := product * one) >= _MAX_PRODUCT:
            told = "the product of the schema's multipleOf that may hold for one number"
            told = f"{told}, each with {most} decimal places and without decimal points,"
            raise GrammarRefused(f"{told} should be less than {_MAX_PRODUCT}, but it is larger")


def _reached(root: Any, begins: list[Json]) -> list[_Reached]:
    """Find the schemas that may become a part of a combined one: those inside it, and those that they refer to. Two
    with different names never hold for one value. A reference to anything but a definition may lead anywhere: then each
    part counts, without a name."""
    definitions = _definitions(root)
    parts = list(dicts(root))
    references = (part["$ref"] for part in parts if isinstance(part.get("$ref"), str))
    if any("$id" in part and part is not root for part in parts) or any(one not in definitions for one in references):
        return [(None, part) for part in parts]
    found: dict[tuple[str | None, int], _Reached] = {}
    waiting: list[tuple[str | None, Any]] = [(None, part) for part in begins]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, list):
            waiting += ((name, inner) for inner in value)
        elif isinstance(value, dict) and (name, id(value)) not in found:
            found[name, id(value)] = name, value
            for keyword, inner in value.items():
                waiting += _inside(name, keyword, inner, definitions)
    return list(found.values())


def _inside(name: str | None, keyword: str, value: Any, definitions: Json) -> Iterable[tuple[str | None, Any]]:
    if keyword in _DEFINITIONS:
        return ()
    if keyword == "$ref":
        return [(None, definitions.get(value))] if isinstance(value, str) else [(None, value)]
    if keyword == "properties" and isinstance(value, dict):
        return value.items()
    if keyword == "patternProperties" and isinstance(value, dict):
        return [(None, inner) for inner in value.values()]
    return [(name if keyword in _IN_PLACE else None, value)]


def _definitions(root: Any) -> Json:
    """Return what a reference may lead to, by the reference."""
    found: Json = {"#": root}
    for kind in _DEFINITIONS if isinstance(root, dict) else ():
        if isinstance(named := root.get(kind), dict):
            found |= {f"#/{kind}/{name}": inner for name, inner in named.items() if not set(name) & set("~%/")}
    return found


def _is_combined(part: Json) -> bool:
    """Whether llguidance may make one schema of this one and others."""
    others = part.keys() - UNWRITTEN - {"$defs", "definitions", "$schema", "$id"}
    return "allOf" in part or (len(others) > 1 and any(name in part for name in ("$ref", "anyOf", "oneOf")))


def _decimal(value: Any) -> _Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    _, digits, exponent = Decimal(str(abs(value))).as_tuple()
    assert isinstance(exponent, int)  # the value is finite
    return _reduced(int("".join(map(str, digits))) * 10 ** max(exponent, 0), max(-exponent, 0))


def _reduced(digits: int, places: int) -> _Decimal:
    while places and digits % 10 == 0:
        digits, places = digits // 10, places - 1
    return digits, places
