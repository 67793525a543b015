"""Makes the table of stalls beside large requests from the saved measurement.
Never measures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "loadtest" / "results" / "ingress_stalls.json"
COLUMNS = ("gap_max_ms", "health_max_ms")


def table(document: dict[str, Any]) -> str:
    """Render for each kind of request the longest gap of a stream and the longest wait for /health, as the median over
    the rounds and as the worst round, both for the worst number of requests at once and the worst context."""
    return "\n".join(_lines(document["cells"]))


def _lines(cells: list[dict[str, Any]]) -> Iterator[str]:
    yield "| beside | longest gap, ms: median | worst round | longest `/health`, ms: median | worst round |"
    yield "|---|---|---|---|---|"
    cases: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        cases[cell["case"]].append(cell)
    for case, found in cases.items():
        spreads = [[cell[column] for cell in found] for column in COLUMNS]  # (median, least, most) of the rounds
        figures = (max(spread[place] for spread in column) for column in spreads for place in (0, 2))
        yield f"| {case} | {' | '.join(f'{figure:.0f}' for figure in figures)} |"


def kept() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return document
