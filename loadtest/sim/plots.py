"""Owns the presentation of each study: its plot in docs/, and its table in loadtest/sim/README.md.
Never simulates, and computes only means and spreads over seeds."""

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
    """A column with a figure of a run or a value of its spec. `scale` converts it to the unit of the title; if `per` is
    given, it is divided by that figure."""

    title: str
    name: str
    digits: int = 1
    scale: float = 1.0
    per: str | None = None

    def value(self, run: Run) -> float:
        """Return the run's value for this column; 0 for a latency without values."""
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
    "targets": [
        GOOD,
        *QUICK_TTFT,
        Column("gap p99, ms", "itl_p99_ms", 0),
        Column("answer tokens a second", "output_tokens_per_s", 0),
    ],
}
OURS = ("ours", "ours-lenient", "prefix-affine", "learned", "time", "tpot")
"""Our policies, which are drawn in colour."""


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Group runs by trace ("" if there is none) and policy."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        spec = run["spec"]
        groups.setdefault((spec.get("trace", ""), spec["policy"]), []).append(run)
    return dict(sorted(groups.items()))


def _title(results: Document) -> str:
    return f"Simulated: {results['study']}"


def svg(results: Document) -> str:
    """Draw cost against good answers for the study of autoscaling, else a panel of bars for each figure."""
    groups = grouped(results["runs"])
    traces = list(dict.fromkeys(trace for trace, _ in groups))
    if results["study"] == "autoscaling":
        panels = [_points(trace, groups) for trace in traces]
        return document(_title(results), panels, columns=2)
    panels = [_bars(trace, column, groups) for trace in traces for column in COLUMNS[results["study"]]]
    return document(_title(results), panels, columns=min(3, len(panels)))


def _points(trace: str, groups: Mapping[tuple[str, str], list[Run]]) -> Panel:
    pairs = {
        policy: [(HOURS.value(run), GOOD.value(run) / 100) for run in runs]
        for (its_trace, policy), runs in groups.items()
        if its_trace == trace
    }
    return points(trace, "replica-hours", "share of good answers", pairs)


def _bars(trace: str, column: Column, groups: Mapping[tuple[str, str], list[Run]]) -> Panel:
    values = {policy: _spread(column, runs) for (its_trace, policy), runs in groups.items() if its_trace == trace}
    return bars(column.title, trace, values, column.digits, OURS)


def _spread(column: Column, runs: Sequence[Run]) -> Spread:
    values = [column.value(run) for run in runs]
    return statistics.fmean(values), min(values), max(values)


def table(results: Document) -> str:
    """Render the means over the seeds, with minimum and maximum in brackets."""
    columns = COLUMNS[results["study"]]
    groups = grouped(results["runs"])
    lines = [f"| trace | policy | seeds | {' | '.join(column.title for column in columns)} |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for (trace, policy), runs in groups.items():
        cells = " | ".join(_cell(column, _spread(column, runs)) for column in columns)
        lines.append(f"| {trace or '–'} | {policy} | {len(runs)} | {cells} |")
    return "\n".join(lines)


def _cell(column: Column, spread: Spread) -> str:
    mean, least, most = (f"{value:.{column.digits}f}" for value in spread)
    return mean if least == most else f"{mean} ({least}–{most})"


def with_table(readme: str, results: Document) -> str:
    """Return the README with the study's table replaced."""
    return with_text(readme, results["study"], table(results))


def for_each(act: Callable[[Document], None]) -> None:
    """Call `act` with the results of each study that has results."""
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
