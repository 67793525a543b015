"""Makes the table of plans beside sweeps from the saved study.
Never simulates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "loadtest" / "results" / "plan.json"


def table(document: dict[str, Any]) -> str:
    """Render for each trace the plan's replicas and good answers beside those of the best trial of the sweep."""
    return "\n".join(_lines(document["loads"]))


def _lines(loads: dict[str, dict[str, Any]]) -> Iterator[str]:
    both = "plan, best"
    yield f"| trace | trials: plan, sweep | replicas: {both} | good, %: {both} | fresh, %: {both} | cost | goodput |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name, found in loads.items():
        plan, best, fresh = found["plan"], found["best"], found["fresh"]
        cells = [
            f"{found['trials']['plan']}, {found['trials']['sweep']}",
            f"{plan['replicas']}, {best['replicas']}",
            f"{100 * plan['good_share']:.1f}, {100 * best['good_share']:.1f}",
            f"{100 * fresh['plan']:.1f}, {100 * fresh['best']:.1f}",
            f"{found['cost_ratio']:.2f}",
            f"{found['goodput_ratio']:.3f}",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def kept() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return document
