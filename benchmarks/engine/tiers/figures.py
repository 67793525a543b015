"""Owns how figures of several rounds become one: the median, with the least and the most.
Never measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Spread = list[float]
"""Median, least and most."""
NOT_MEASURED = "Not measured yet."


def spread(values: Sequence[float]) -> Spread:
    return [statistics.median(values), min(values), max(values)]


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of each figure over the rounds, which all have the same figures."""
    return {name: spread([figures[name] for figures in rounds]) for name in rounds[0]}


def shown(figure: Sequence[float], digits: int = 0) -> str:
    """Format a spread for a table."""
    median, least, most = (f"{value:,.{digits}f}" for value in figure)
    return f"{median} ({least}–{most})"
