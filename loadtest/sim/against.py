"""Owns the comparison of a live load's report with a simulation of the same load: percentiles of TTFT and TPOT, by
point.
Never asks a server or fits anything: step times are measured on the engine alone."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.marks import with_text
from loadtest.report import SCHEMA, Document
from loadtest.server import ROOT
from loadtest.sim import load
from loadtest.sim.plots import README
from loadtest.sim.step_time import measured
from loadtest.sim.studies import RESULTS, current_commit
from loadtest.sim.validation import ENGINE
from loadtest.slo import BROKEN, MISSED, PASSED, SATURATED

KEPT = RESULTS / "sim_against_live.json"
TIMES = {"ttft": "TTFT, ms", "tpot": "TPOT, ms"}
SHARES = ("p50", "p90", "p99")
WITHIN = 1.75
"""The factor by which a simulated percentile may differ from the measured one, in either direction."""
DEPLOYMENT = ("replicas", "router", "engine", "steps")
_COUNTS = ("offered", "ok", "prompt_tokens", "output_tokens")
_OF_THE_PLAN = (
    *("scenario", "seconds", "warm_up", "rate", "rates", "clients", "arrivals", "cv", "lengths", "longest", "trace"),
    *("do", "goal", "seed"),
)
"""Settings of a report that define its load. The simulation refuses `do`, which disturbs a deployment."""


def options_of(live: Document, deployment: Sequence[str]) -> argparse.Namespace:
    """Return the options of `make simulate` for the same load as the live one. `deployment` describes the live server.

    Raises:
        ValueError: the document is not a load's report, its generator lagged or broke, or it is simulated itself.
    """
    schema = live.get("schema") if isinstance(live, dict) else None  # any JSON file may be given
    if schema != SCHEMA:
        raise ValueError(f"schema {schema} is not {SCHEMA}, that of a load's report.json")
    if live["exit_code"] in (SATURATED, BROKEN):
        raise ValueError(f"the live run failed with code {live['exit_code']}: {[*live['broken'], *live['saturated']]}")
    if "deployment" in live:
        raise ValueError("the report is of a simulated load: there is nothing live in it")
    settings = live["settings"]
    asked = [(name, settings[name]) for name in _OF_THE_PLAN if settings[name] not in (None, "")]
    words = [word for name, value in asked for word in (f"--{name.replace('_', '-')}", str(value))]
    return load.parser().parse_args([*words, *deployment])


def rows(live: Document, simulated: Document) -> Iterator[dict[str, Any]]:
    """Yield a row for each point and each of TIMES, with the counts of requests and tokens and each percentile in
    milliseconds.

    Raises:
        ValueError: the points differ.
    """
    names = [[point["name"] for point in document["points"]] for document in (live, simulated)]
    if names[0] != names[1]:
        raise ValueError(f"the live load has the points {names[0]}, the simulated one {names[1]}")
    for live_point, simulated_point in zip(live["points"], simulated["points"], strict=True):
        both = {"measured": live_point["figures"], "simulated": simulated_point["figures"]}
        counts = {name: {side: figures[name] for side, figures in both.items()} for name in _COUNTS}
        for time in TIMES:
            yield {"point": live_point["name"], "time": time, "counts": counts, "ms": dict(_percentiles(time, both))}


def _percentiles(time: str, both: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the percentiles that both sides have. Answers of one token, for example, have no TPOT."""
    for share in SHARES:
        ms = {side: figures.get(f"{time}_{share}_ms", 0.0) for side, figures in both.items()}
        if all(ms.values()):
            yield share, {**ms, "ratio": ms["simulated"] / ms["measured"]}


def compare(live: Document, deployment: Sequence[str], within: float = WITHIN) -> Document:
    """Simulate the live load and compare the two.

    Raises:
        ValueError: as `options_of`, `rows` and `load.check`; also if nothing was answered or `within` is below 1.
    """
    if not 1 <= within < math.inf:
        raise ValueError(f"--within is a factor, 1 or more, not {within:g}")
    options = options_of(live, deployment)
    found = list(rows(live, load.run(options)))
    ratios = [cell["ratio"] for row in found for cell in row["ms"].values()]
    if not ratios:
        raise ValueError("nothing was answered, so there is nothing to compare")
    steps: Path = options.steps
    step_time, error = measured(steps)
    return {
        "live": live["settings"],
        "simulated": {name: getattr(options, name) for name in ("replicas", "router", "engine")},
        "step_time": {"measured_in": _shown(steps), **asdict(step_time), "largest_error": error},
        "commit": current_commit(),
        "within": within,
        "largest_factor": max(max(ratio, 1 / ratio) for ratio in ratios),
        "rows": found,
    }


def _shown(path: Path) -> str:
    """The path relative to the repository, or only the file's name: the folders of one machine mean nothing to
    others."""
    return str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else path.name


def table(compared: Document) -> str:
    """Render a table of measured → simulated with the difference in percent."""
    lines = [f"| measured → simulated | {' | '.join(SHARES)} |", "|---" * (1 + len(SHARES)) + "|"]
    for row in compared["rows"]:
        cells = [_cell(row["ms"].get(share)) for share in SHARES]
        lines.append(f"| {row['point']}: {TIMES[row['time']]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", conclusion(compared)])


def _cell(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "–"
    return f"{found['measured']:.0f} → {found['simulated']:.0f} ({100 * (found['ratio'] - 1):+.0f} %)"


def conclusion(compared: Document) -> str:
    """Say in a sentence whether all percentiles are within the bound."""
    most, within = compared["largest_factor"], compared["within"]
    relation = "within" if most <= within else "beyond"
    return f"The largest deviation is a factor of {most:.2f}, {relation} the bound of {within:g}."


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m loadtest.sim.against",
        description="Compare the report of a load on a live server with the same load simulated: percentiles of TTFT "
        "and TPOT at each point.",
        allow_abbrev=False,
    )
    made.add_argument("report", type=Path, help="report.json of `make load`")
    load.add_deployment(made)
    made.set_defaults(engine=",".join(f"{name}={value}" for name, value in ENGINE.items()))
    made.add_argument(
        "--within", type=float, default=WITHIN, help="factor by which a percentile may differ (%(default)s)"
    )
    made.add_argument(
        "--out",
        type=Path,
        help="JSON file for the result; the kept file and the table in loadtest/sim/README.md are then left alone",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(arguments)
    deployment = [word for name in DEPLOYMENT for word in (f"--{name}", str(getattr(options, name)))]
    try:
        compared = compare(json.loads(options.report.read_text()), deployment, options.within)
    except (ValueError, OSError) as wrong:
        made.error(str(wrong))
    (options.out or KEPT).write_text(json.dumps(compared, indent=1) + "\n")
    if options.out is None:
        README.write_text(with_text(README.read_text(), "against", table(compared)))
    print(table(compared))
    sys.exit(PASSED if compared["largest_factor"] <= compared["within"] else MISSED)


if __name__ == "__main__":
    main()
