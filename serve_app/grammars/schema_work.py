"""Owns the limits on the work that a JSON schema makes for llguidance, which nothing interrupts.
Never measures time: what is refused is the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, TypeAlias

from serve_app.grammars.notation import GrammarRefused, Json
from serve_app.grammars.schema_parts import UNWRITTEN, dicts

_Decimal: TypeAlias = tuple[int, int]
"""Digits, and how many of them are behind the point."""

MAX_PATTERN_PROPERTIES = 64
"""llguidance compares each with each other one: 64 take 20 ms, 300 take 25 s."""
MAX_COMBINED_PATTERN_PROPERTIES = 8
"""The same where `allOf` and the like may compare them thousands of times."""
MAX_MULTIPLES = 10_000
"""Limits the sum of all `multipleOf`, without their decimal points. Its states are as many: 10,000 take 60 ms, a
million takes 24 s and 312 MiB."""
_MAX_PRODUCT = 2**32
"""llguidance multiplies them in 32 bits where it combines them."""


def check_work(schema: Any) -> None:
    """
    Raises:
        GrammarRefused: the schema has too many `patternProperties`, or a `multipleOf` that is too large.
    """
    parts = list(dicts(schema))
    is_combined = any(map(_is_combined, parts))
    named = (part.get("patternProperties") for part in parts)
    count = sum(len(patterns) for patterns in named if isinstance(patterns, dict))
    limit = MAX_COMBINED_PATTERN_PROPERTIES if is_combined else MAX_PATTERN_PROPERTIES
    if count > limit:
        where = " with allOf, or with $ref, anyOf or oneOf beside other keywords," if is_combined else ""
        raise GrammarRefused(f"a schema{where} should have at most {limit} patternProperties, but it has {count}")
    steps = {step for part in parts if (step := _decimal(part.get("multipleOf"))) is not None}
    is_combined |= any("patternProperties" in part and "properties" in part for part in parts)
    _check_multiples(steps, is_combined=is_combined)


def _check_multiples(steps: Iterable[_Decimal], *, is_combined: bool) -> None:
    found = sorted(steps)
    total = sum(digits for digits, _ in found)
    told = f"the schema's multipleOf, without decimal points, should be at most {MAX_MULTIPLES}"
    if total > MAX_MULTIPLES:
        raise GrammarRefused(f"{told}{' together' * (len(found) > 1)}, but it is {total}")
    if is_combined and len(found) > 1:
        most = max(places for _, places in found)
        digits = [digits * 10 ** (most - places) for digits, places in found]
        common, _ = _reduced(math.lcm(*digits), most)
        if common > MAX_MULTIPLES or math.prod(digits) >= _MAX_PRODUCT:
            raise GrammarRefused(f"{told}, but where several hold for one number it may be {common}")


def _is_combined(part: Json) -> bool:
    """Whether llguidance may make one schema of this one and others."""
    others = part.keys() - UNWRITTEN - {"$defs", "definitions", "$schema", "$id"}
    return "allOf" in part or (len(others) > 1 and any(name in part for name in ("$ref", "anyOf", "oneOf")))


def _decimal(value: Any) -> _Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not value:
        return None
    _, digits, exponent = Decimal(str(abs(value))).as_tuple()
    assert isinstance(exponent, int)  # the value is finite
    return _reduced(int("".join(map(str, digits))) * 10 ** max(exponent, 0), max(-exponent, 0))


def _reduced(digits: int, places: int) -> _Decimal:
    while places and digits % 10 == 0:
        digits, places = digits // 10, places - 1
    return digits, places
