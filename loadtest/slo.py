"""Owns service level objectives: the latencies up to which one answer is good, and the limits for a whole load.
Never measures: limits are compared with figures, and a missing figure breaks its limit."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.timeline import OK, Timeline

PASSED, MISSED, SATURATED, BROKEN = 0, 3, 4, 5
"""Exit codes: all limits kept; a limit missed; the generator was too slow to tell; a part of the run is missing."""

_LIMIT = re.compile(r"(?P<figure>[a-z0-9_.]+)(?P<sign><=|>=)(?P<bound>[0-9.]+(?:e-?[0-9]+)?)")
_SIGNS = {"<=": operator.le, ">=": operator.ge}
_TIMES = ("ttft", "tpot", "e2e", "gap_p95")


@dataclass(frozen=True, slots=True)
class Goal:
    """Latencies up to which an answer counts as good, in milliseconds; None means no limit."""

    ttft_ms: float | None = 1000.0
    tpot_ms: float | None = 100.0
    e2e_ms: float | None = None
    gap_p95_ms: float | None = None
    """Bound on the 95th percentile of the gaps between the answer's tokens. TPOT is a mean and hides pauses."""

    def is_met(self, answer: Timeline) -> bool:
        """Whether the answer is good. Refused, failed and cut-off answers never are. A single token meets any TPOT."""
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
    """Parse `ttft:1000,tpot:50,e2e:30000`, in milliseconds. A latency that is left out has no limit.

    Raises:
        ValueError: a name is unknown or repeated, or a number is not positive.
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
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ValueError(f"{part!r} needs a positive number of milliseconds")
    return limit


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper or lower bound for a figure of the report."""

    figure: str
    sign: str
    bound: float

    def miss(self, figures: Mapping[str, float]) -> str | None:
        """Return how the figures miss the limit, or None if they keep it."""
        value = figures.get(self.figure)
        if value is None:
            return f"{self.figure} {self.sign} {self.bound:g}: there is no such figure"
        return None if _SIGNS[self.sign](value, self.bound) else f"{self.figure} {self.sign} {self.bound:g}: {value:g}"


def parse_limits(text: str) -> list[Limit]:
    """Parse limits such as `ttft_p99_ms<=1000,failed_share<=0.01`.

    Raises:
        ValueError: a part is not such a comparison.
    """
    limits = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _LIMIT.fullmatch(part)
        if found is None:
            raise ValueError(f"a limit is FIGURE<=NUMBER or FIGURE>=NUMBER, not {part!r}")
        limits.append(Limit(found["figure"], found["sign"], float(found["bound"])))
    return limits


def misses(limits: Iterable[Limit], points: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return every limit that a point misses, with the point's name."""
    limits = list(limits)
    found = [(name, limit.miss(figures)) for name, figures in points.items() for limit in limits]
    return [f"{name}: {miss}" for name, miss in found if miss]


def exit_code(broken: Sequence[str], saturated: Sequence[str], missed: Sequence[str]) -> int:
    """Return the code of the gravest problem. The figures of a lagging generator prove neither that a limit is kept nor
    that it is missed."""
    if broken:
        return BROKEN
    return SATURATED if saturated else MISSED if missed else PASSED
