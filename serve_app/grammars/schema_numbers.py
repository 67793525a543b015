"""Owns the numbers of a JSON schema: bounds become ones that llguidance keeps, and what it would mistake is refused.
Never admits more than the schema does, except where a bound is the largest double, which a number hardly exceeds."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from serve_app.grammars.notation import GrammarRefused, Json
from serve_app.grammars.schema_parts import dicts, inside

# llguidance 1.9.1 reads all numbers as doubles and writes integers of 64 bits. Its range from -2^63 to itself recurses
# until the stack overflows, which ends the process.
_Number: TypeAlias = int | float
_LAST_EXACT = 2**53
"""Every smaller integer is a double."""
_LAST = 2**63 - 1
_FIRST = -(2**63) + 1024
"""The lowest double whose negation is an integer of 64 bits."""
_OPEN_END = 10**18
"""From here on llguidance cannot write a range with one end."""
_DIGITS = 15
"""A number with so many digits is read as it is written."""
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def check_numbers(schema: Json) -> None:
    """Check a schema whose bounds are kept ones. A reference may lead anywhere, so everything in it may be a schema.

    Raises:
        GrammarRefused: a number would be mistaken for another.
    """
    for part in dicts(schema):
        for name in ("const", "enum"):
            for value in _numbers(part.get(name)):
                if not _is_exact(value):
                    text = f"the schema's {name} has {str(value)[:50]}, which cannot be kept exactly"
                    raise GrammarRefused(f"{text}: should be less than 2^63 and exact as a double; or use a string")
        for name in _BOUNDS:
            bound = part.get(name)
            if _is_number(bound) and (bound < _FIRST or (isinstance(bound, float) and bound <= -_LAST_EXACT)):
                raise _refused(name, bound, f"at least {_FIRST}")


def _is_exact(value: _Number) -> bool:
    if isinstance(value, float):
        return abs(value) < _LAST_EXACT
    return value == _LAST or (_FIRST <= value < _LAST and float(value) == value)


def _numbers(value: Any) -> Iterator[_Number]:
    if _is_number(value):
        yield value
    elif isinstance(value, dict | list):
        for inner in inside(value):
            yield from _numbers(inner)


def _is_number(value: Any) -> TypeGuard[_Number]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # no NaN


def as_integers(value: Any) -> Any:
    """Return the value of a `const` or `enum` with its large numbers as integers: their fraction is 0, and llguidance
    may read 9.223372036854775e18 as the double beside it."""
    if isinstance(value, dict):
        return {name: as_integers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_integers(inner) for inner in value]
    return int(value) if isinstance(value, float) and _LAST_EXACT <= abs(value) < _LAST else value


def fractions(schema: Json) -> list[float]:
    """List the bounds with a fraction, anywhere in the schema: `allOf` may bring any two bounds together."""
    bounds = (part.get(name) for part in dicts(schema) for name in _BOUNDS)
    return [bound for bound in bounds if isinstance(bound, float) and math.isfinite(bound) and bound % 1]


def with_kept_bounds(part: Json, fractions: Sequence[float]) -> Json:
    """Return a schema with bounds that llguidance keeps. A bound that no double holds moves inwards to the next one.
    `fractions`: those of the whole schema.

    Raises:
        GrammarRefused: llguidance can write no number within a bound.
    """
    written = dict(part)
    for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        end = _End.of(part, *names)
        if end is not None and end.is_moved(fractions):
            for name in names:
                written.pop(name, None)
            if (bound := end.moved()) is not None:
                written[names[0]] = bound
    return _with_both_ends(written)


def _with_both_ends(part: Json) -> Json:
    lowest, highest = part.get("minimum"), part.get("maximum")
    if _is_number(lowest) and lowest >= _OPEN_END and "exclusiveMaximum" not in part:
        return {"maximum": _LAST if _is_of_integers(part) else -_FIRST} | part
    if _is_number(highest) and highest <= -_OPEN_END and "exclusiveMinimum" not in part:
        return {"minimum": _FIRST} | part
    return part


def _is_of_integers(part: Json) -> bool:
    kinds = part.get("type")
    return kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a range. `bound`: the bound of a lower end, or of an upper end the bound times -1, so that both are
    moved upwards."""

    name: str
    bound: _Number
    is_exclusive: bool
    is_upper: bool
    is_of_integers: bool

    @classmethod
    def of(cls, part: Json, inclusive: str, exclusive: str) -> _End | None:
        """Return the tighter one of the two bounds. In draft 4 the exclusive one is a boolean."""
        first, second = part.get(inclusive), part.get(exclusive)
        sign = -1 if inclusive == "maximum" else 1
        found = [(sign * first, second is True, inclusive)] if _is_number(first) else []
        if _is_number(second):
            found.append((sign * second, True, exclusive))
        if not found:
            return None
        bound, is_exclusive, name = max(found)
        return cls(name, bound, is_exclusive, sign < 0, _is_of_integers(part))

    def is_moved(self, fractions: Sequence[float]) -> bool:
        """Whether llguidance would mistake the bound. It admits an exclusive one that is nearer to 0 than a fraction of
        the same integer: to it, 0 is more than 0 and at most 0.5."""
        if abs(self.bound) >= _LAST_EXACT:
            return True
        beside = (-fraction if self.is_upper else fraction for fraction in fractions)
        is_whole = self.is_exclusive and not self.is_of_integers and self.bound >= 0 and self.bound % 1 == 0
        return is_whole and any(self.bound < fraction < self.bound + 1 for fraction in beside)

    def moved(self) -> _Number | None:
        """Return the inclusive bound to write, or None for no bound.

        Raises:
            GrammarRefused: llguidance can write no number within the bound.
        """
        if abs(self.bound) < _LAST_EXACT:
            places = _DIGITS - len(str(abs(int(self.bound))))
            bound: _Number = round(self.bound + 10**-places, places)
        elif self.is_upper and self.is_of_integers and -self.bound - self.is_exclusive >= _LAST:
            return _LAST
        elif (double := self._double()) >= _FIRST:
            bound = int(double)
        elif not self.is_of_integers and self.bound <= -sys.float_info.max:
            return None
        else:
            bound = _FIRST
        return -bound if self.is_upper else bound

    def _double(self) -> float:
        """Return the lowest double within the bound."""
        try:
            double = float(self.bound)
        except OverflowError:
            double = math.inf if self.bound > 0 else -math.inf
        if double < self.bound or (self.is_exclusive and double == self.bound):
            double = math.nextafter(double, math.inf)
        if double > -_FIRST:
            limit = f"at least {_FIRST}" if self.is_upper else f"at most {-_FIRST}"
            raise _refused(self.name, -self.bound if self.is_upper else self.bound, limit)
        return double


def _refused(name: str, bound: _Number, limit: str) -> GrammarRefused:
    return GrammarRefused(f"the schema's {name} should be {limit}, but it is {str(bound)[:50]}")
