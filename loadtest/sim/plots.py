"""Owns what each study shows: its plot in docs/, and its table in loadtest/sim/README.md.
Never simulates, and computes nothing but means and spreads over seeds."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.marks import with_text
from loadtest.panels import Panel, Spread, bars, document, points
from loadtest.server import ROOT
from loadtest.sim.studies import RESULTS, Document

README = Path(__file__).parent / "README.md"
DOCS = ROOT / "docs"
Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run, or a value of its spec; `scale` turns its unit into that of the title. `per`: divided by that
    figure."""

    title: str
    name: str
    digits: int = 1
    scale: float = 1.0
    per: str | None = None

    def of(self, run: Run) -> float:
        """0 for a time of which there is no value."""
        known: dict[str, float] = {**run["spec"], **run["figures"]}
        return self.scale * known.get(self.name, 0.0) / (known.get(self.per, 1.0) if self.per else 1.0)


GOOD = Column("good, %", "good_share", 1, 100)
TTFT = [Column(f"TTFT {share}, s", f"ttft_{share}_ms", 1, 0.001) for share in ("p50", "p99")]
QUICK_TTFT = [Column(f"TTFT {share}, ms", f"ttft_{share}_ms", 0) for share in ("p50", "p99")]
HOURS = Column("replica-hours", "replica_hours", 2)
COLUMNS: dict[str, list[Column]] = {
    "autoscaling": [GOOD, HOURS, *TTFT, Column("TPOT p99, ms", "tpot_p99_ms", 0)],
    "routing": [GOOD, *TTFT, Column("prompt tokens cached, %", "cached_share", 1, 100)],
    "reservation": [
        GOOD,
        *QUICK_TTFT,
        Column("longest gap, ms", "itl_max_ms", 0),
        Column("preemptions a request", "preemptions", 3, per="offered"),
    ],
    "scale": [
        Column("replicas", "replicas", 0),
        Column("requests", "offered", 0),
        Column("steps, thousands", "steps", 0, 0.001),
        Column("simulated, s", "simulated_s", 0),
        Column("CPU, s", "cpu_s", 0),
        Column("wall, s", "wall_s", 0),
        Column("memory, MiB", "peak_memory_mib", 0),
    ],
    "disruption": [
        Column("requests", "offered", 0),
        GOOD,
        *QUICK_TTFT,
        Column("longest gap, ms", "itl_max_ms", 0),
        Column("answers moved", "moves", 0),
    ],
}
OURS = ("ours", "ours-lenient", "prefix-affine", "learned")
"""Policies of ours, which have a colour."""


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """By trace ("" where there is none) and policy, in order of their first run's seed."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        spec = run["spec"]
        found.setdefault((spec.get("trace", ""), spec["policy"]), []).append(run)
    return dict(sorted(found.items()))


def _title(results: Document) -> str:
    return f"Simulated: {results['study']}"


def svg(results: Document) -> str:
    """Points of cost and good answers for policies that scale, else a panel of bars for each figure."""
    found = grouped(results["runs"])
    traces = list(dict.fromkeys(trace for trace, _ in found))
    if results["study"] == "autoscaling":
        panels = [_points(trace, found) for trace in traces]
        return document(_title(results), panels, columns=2)
    panels = [_bars(trace, column, found) for trace in traces for column in COLUMNS[results["study"]]]
    return document(_title(results), panels, columns=min(3, len(panels)))


def _points(trace: str, found: Mapping[tuple[str, str], list[Run]]) -> Panel:
    pairs = {
        policy: [(HOURS.of(run), GOOD.of(run) / 100) for run in runs]
        for (of, policy), runs in found.items()
        if of == trace
    }
    return points(trace, "replica-hours", "share of good answers", pairs)


def _bars(trace: str, column: Column, found: Mapping[tuple[str, str], list[Run]]) -> Panel:
    values = {policy: _spread(column, runs) for (of, policy), runs in found.items() if of == trace}
    return bars(column.title, trace, values, column.digits, OURS)


def _spread(column: Column, runs: Sequence[Run]) -> Spread:
    values = [column.of(run) for run in runs]
    return statistics.fmean(values), min(values), max(values)


def table(results: Document) -> str:
    """Means over the seeds, least and most in brackets."""
    columns = COLUMNS[results["study"]]
    found = grouped(results["runs"])
    lines = [f"| trace | policy | seeds | {' | '.join(column.title for column in columns)} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for (trace, policy), runs in found.items():
        cells = " | ".join(_cell(column, _spread(column, runs)) for column in columns)
        lines.append(f"| {trace or '–'} | {policy} | {len(runs)} | {cells} |")
    return "\n".join(lines)


def _cell(column: Column, spread: Spread) -> str:
    mean, least, most = (f"{value:.{column.digits}f}" for value in spread)
    return mean if least == most else f"{mean} ({least}–{most})"


def with_table(readme: str, results: Document) -> str:
    """README with the study's table."""
    return with_text(readme, results["study"], table(results))


def for_each(act: Callable[[Document], None]) -> None:
    """With the results of each study that has some."""
    for study in COLUMNS:
        path = RESULTS / f"sim_{study}.json"
        if path.exists():
            act(json.loads(path.read_text()))


def draw(results: Document) -> None:
    """Write the study's plot and its table."""
    (DOCS / f"sim_{results['study']}.svg").write_text(svg(results))
    README.write_text(with_table(README.read_text(), results))


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m loadtest.sim.plots",
        description="Draw the plot of each study and write its table into loadtest/sim/README.md.",
    ).parse_args()
    for_each(draw)
