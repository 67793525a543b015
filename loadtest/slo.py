"""Owns what a service promises: the times by which one answer is good, and the limits that a whole load has to keep.
Never measures: limits are held against figures, and a figure that is not there breaks its limit."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.timeline import OK, Timeline

PASSED, MISSED, SATURATED, BROKEN = 0, 3, 4, 5
"""Exit codes: all kept; a limit missed; the generator was too slow to say; a part of the run is missing."""

_LIMIT = re.compile(r"(?P<figure>[a-z0-9_.]+)(?P<sign><=|>=)(?P<bound>[0-9.]+(?:e-?[0-9]+)?)")
_SIGNS = {"<=": operator.le, ">=": operator.ge}
_TIMES = ("ttft", "tpot", "e2e", "gap_p95")


@dataclass(frozen=True, slots=True)
class Goal:
    """By when an answer has to be there to count as good, in milliseconds; None: whenever."""

    ttft_ms: float | None = 1000.0
    tpot_ms: float | None = 100.0
    e2e_ms: float | None = None
    gap_p95_ms: float | None = None
    """Of the gaps between its own tokens, 95 in a hundred are as short: where TPOT, a mean, forgives pauses."""

    def is_met(self, answer: Timeline) -> bool:
        """Refused, broken and cut-off answers are not good, however fast. One token alone keeps any TPOT."""
        if answer.outcome != OK or answer.ttft_ms is None:
            return False
        gap_ms = None if self.gap_p95_ms is None else answer.gap_ms(0.95)
        pairs = [
            (answer.ttft_ms, self.ttft_ms),
            (answer.tpot_ms, self.tpot_ms),
            (answer.e2e_ms, self.e2e_ms),
            (gap_ms, self.gap_p95_ms),
        ]
        return all(took is None or limit is None or took <= limit for took, limit in pairs)


def parse_goal(text: str) -> Goal:
    """`ttft:1000,tpot:50,e2e:30000`, in milliseconds; what is left out has no limit.

    Raises:
        ValueError: another name, a name twice, or no positive number.
    """
    limits: dict[str, float | None] = dict.fromkeys((f"{name}_ms" for name in _TIMES), None)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        key = f"{name.strip()}_ms"
        if key not in limits or limits[key] is not None:
            raise ValueError(f"a goal is made of {', '.join(_TIMES)}, each once at most, not {part!r}")
        limits[key] = _positive(value, part)
    return Goal(**limits)


def _positive(value: str, part: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError(f"{part!r} needs a positive number of milliseconds")
    return found


@dataclass(frozen=True, slots=True)
class Limit:
    """A gate: a figure of the report that has to be at most, or at least, so much."""

    figure: str
    sign: str
    bound: float

    def miss(self, figures: Mapping[str, float]) -> str | None:
        """What is wrong; None if it is kept."""
        value = figures.get(self.figure)
        if value is None:
            return f"{self.figure} {self.sign} {self.bound:g}: there is no such figure"
        return None if _SIGNS[self.sign](value, self.bound) else f"{self.figure} {self.sign} {self.bound:g}: {value:g}"


def parse_limits(text: str) -> list[Limit]:
    """`ttft_p99_ms<=1000,failed_share<=0.01`: figures of a point's summary and their bounds.

    Raises:
        ValueError: a part that is no such comparison.
    """
    limits = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _LIMIT.fullmatch(part)
        if found is None:
            raise ValueError(f"a limit is FIGURE<=NUMBER or FIGURE>=NUMBER, not {part!r}")
        limits.append(Limit(found["figure"], found["sign"], float(found["bound"])))
    return limits


def misses(limits: Iterable[Limit], points: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Every limit that a point does not keep, by the point's name."""
    limits = list(limits)
    found = [(name, limit.miss(figures)) for name, figures in points.items() for limit in limits]
    return [f"{name}: {miss}" for name, miss in found if miss]


def exit_code(broken: Sequence[str], saturated: Sequence[str], missed: Sequence[str]) -> int:
    """The gravest first: figures of a generator that lags prove nothing, neither that a limit is kept nor that it
    is missed."""
    if broken:
        return BROKEN
    return SATURATED if saturated else MISSED if missed else PASSED
