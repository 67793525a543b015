"""Owns a load's report as lines for a terminal: a table with a row for each point, and what is wrong with the run.
Never judges: the report says whether the load passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadtest import report
from loadtest.report import Document

_COUNTS = {"offered": "sent", "good": "good", "failed": "failed", "rejected": "refused"}
_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "gaps"}
_RATES = {"goodput_per_s": "good/s", "output_tokens_per_s": "tokens/s"}
_NONE = "–"


def table(document: Document) -> list[str]:
    """Return the lines of the table. Times are p50/p99 in milliseconds, and `–` where nothing was answered."""
    head = ["", *_COUNTS.values(), *(f"{title}, ms" for title in _TIMES.values()), *_RATES.values()]
    return aligned([head, *(_row(point) for point in document["points"])])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align cells in columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in rows
    ]


def reasons(document: Document) -> Iterator[str]:
    """Yield why a run did not pass, and the errors of its requests with their numbers."""
    yield from report.reasons(document)
    yield from (f"{number} x {' '.join(error.split())}" for error, number in document["errors"].items())


def _row(point: Mapping[str, Any]) -> list[str]:
    figures = point["figures"]
    counts = [f"{figures.get(name, 0):.0f}" for name in _COUNTS]
    times = [_pair(figures.get(f"{name}_p50_ms"), figures.get(f"{name}_p99_ms")) for name in _TIMES]
    rates = [f"{figures.get(name, 0.0):.1f}" for name in _RATES]
    return [point["name"], *counts, *times, *rates]


def _pair(p50: float | None, p99: float | None) -> str:
    return _NONE if p50 is None or p99 is None else f"{p50:.0f}/{p99:.0f}"
