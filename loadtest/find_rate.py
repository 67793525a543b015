"""Owns the search for the highest rate at which a server keeps its limits. Each rate is a separate run of an open load.
Never trusts a lagging generator: a run that proves nothing ends the search with that run's exit code."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.load import check, parser, run, without
from loadtest.report import Document, write
from loadtest.slo import BROKEN, MISSED, PASSED

LIMITS = "failed<=0,rejected<=0,good_share>=0.99"
LEAST = 1e-3
"""Requests a second. A server that misses its limits at this rate is taken to miss them at every rate."""
_SCENARIOS = ("smoke", "rates", "prefix", "interference", "trace")
"""The scenarios that take a single rate."""


class Undecided(RuntimeError):
    """A run shows neither that the limits are kept nor that they are missed."""

    def __init__(self, rate: float, code: int, why: str = "") -> None:
        super().__init__(f"the run at {rate:g} requests/s {why or f'ended with code {code}'}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Bracket:
    """The two rates between which the highest acceptable one lies."""

    kept: float
    """The highest rate that kept the limits each time it was tried; 0 if none did."""
    missed: float
    """The lowest rate that missed them; infinite if none did."""


def search(keeps: Callable[[float], bool], start: float, precision: float, most: float) -> Bracket:
    """Double or halve the rate until one rate keeps the limits and another misses them. Then bisect on a logarithmic
    scale until their ratio is `1 + precision`. A load is random, so the result is tried once more, and a rate that
    does not keep its limits twice is given up for a lower one."""
    bracket = _enclosed(keeps, start, most)
    while True:
        bracket = _narrowed(keeps, bracket, precision)
        if not bracket.kept or keeps(bracket.kept):
            return bracket
        below = _enclosed(keeps, bracket.kept / 2, bracket.kept / 2)
        bracket = Bracket(below.kept, min(below.missed, bracket.kept))


def _enclosed(keeps: Callable[[float], bool], start: float, most: float) -> Bracket:
    if keeps(start):
        kept = start
        while kept < most:
            rate = min(2 * kept, most)
            if not keeps(rate):
                return Bracket(kept, rate)
            kept = rate
        return Bracket(kept, math.inf)
    missed = start
    while missed / 2 >= LEAST:
        if keeps(missed / 2):
            return Bracket(missed / 2, missed)
        missed /= 2
    return Bracket(0.0, missed)


def _narrowed(keeps: Callable[[float], bool], bracket: Bracket, precision: float) -> Bracket:
    kept, missed = bracket.kept, bracket.missed
    while kept and missed < math.inf and missed / kept > 1 + precision:
        middle = math.sqrt(kept * missed)
        kept, missed = (middle, missed) if keeps(middle) else (kept, middle)
    return Bracket(kept, missed)


class Runs:
    """Runs the load at one rate after another, and keeps the reports."""

    def __init__(self, arguments: Sequence[str], out: Path, seed: int | None) -> None:
        self._arguments, self._out, self._seed = arguments, out, seed
        self.documents: list[Document] = []

    def keeps(self, rate: float) -> bool:
        """Run the load at this rate. Raises: Undecided: the limits are neither kept nor missed."""
        number = len(self.documents) + 1
        folder = self._out / f"run-{number}"
        own = ["--rate", repr(rate), "--out", str(folder)]
        if self._seed is not None:  # the previous run's prompts would be in the prefix cache
            own += ["--seed", str(self._seed + number)]
        code = run([*self._arguments, *own])
        if code not in (PASSED, MISSED):
            raise Undecided(rate, code)
        document: Document = json.loads((folder / "report.json").read_text())
        kinds = document["points"][0]["kinds"]
        if undue := [kind for kind, figures in kinds.items() if not figures["offered"]]:
            why = f"had no request of kind {undue[0]} after its warm-up: --seconds is too short for this rate"
            raise Undecided(rate, BROKEN, why)
        result = "kept" if code == PASSED else "missed"
        document["points"][0] |= {"name": f"{rate:.4g} requests/s: {result}", "x": rate}
        self.documents.append(document)
        print(f"=> {rate:.4g} requests/s: {result}", flush=True)
        return code == PASSED


def summary(documents: Sequence[Document], bracket: Bracket) -> Document:
    """Make one document of all runs, with a point for each. The time series are those of the run at the rate that was
    found, or of the last run."""
    shown = [document for document in documents if document["points"][0]["x"] == bracket.kept] or documents
    missed = [] if bracket.kept else [f"the limits are not kept at {bracket.missed:g} requests/s either"]
    found: dict[str, Any] = {"rate_per_s": bracket.kept, "runs": len(documents)}
    if bracket.missed < math.inf:
        found["missed_at_per_s"] = bracket.missed
    return shown[-1] | {
        "exit_code": PASSED if bracket.kept else MISSED,
        "missed": missed,
        "plan": found,
        "x_label": "requests offered a second",
        "points": sorted((document["points"][0] for document in documents), key=lambda point: float(point["x"])),
    }


def options_of(given: Sequence[str]) -> argparse.Namespace:
    """Raises: SystemExit: with USAGE and the reason, before anything is started."""
    made = parser("python -m loadtest.find_rate")
    made.description = (
        "Find the highest rate of requests at which a server keeps its limits. Each rate is a run of its own. The "
        "search doubles the rate until the limits are missed, and then narrows the range down. It ends early if the "
        "load generator itself was too slow for a run to prove anything."
    )
    made.add_argument(
        "--start", type=float, default=1.0, help="rate of the first run, in requests a second (%(default)s)"
    )
    made.add_argument(
        "--precision", type=float, default=0.1, help="relative error allowed in the result: 0.1 is 10 %% (%(default)s)"
    )
    made.add_argument(
        "--most", type=float, default=1000.0, help="highest rate that is tried, in requests a second (%(default)s)"
    )
    made.set_defaults(scenario="rates", limits=LIMITS)
    options = made.parse_args(given)
    if options.scenario not in _SCENARIOS:
        made.error(f"--scenario is one of {', '.join(_SCENARIOS)}")
    if options.rate is not None or options.rates or options.worker_of:
        made.error(
            "--rate, --rates and --worker-of do not go with a search: it chooses the rate and starts the workers"
        )
    if not (LEAST <= options.start <= options.most < math.inf and 0 < options.precision < math.inf):
        made.error(f"--start is from {LEAST:g} to --most, and --precision is positive")
    check(options)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # ends the current run, too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    given = sys.argv[1:] if arguments is None else arguments
    options = options_of(given)
    own = without(given, ("--start", "--precision", "--most", "--scenario", "--limits", "--out", "--seed"))
    own += ["--scenario", options.scenario, "--limits", options.limits]
    runs = Runs(own, Path(options.out), options.seed)
    try:
        bracket = search(runs.keeps, options.start, options.precision, options.most)
    except Undecided as undecided:
        print(f"no rate was found: {undecided}", file=sys.stderr)
        sys.exit(undecided.code)
    document = summary(runs.documents, bracket)
    write(document, Path(options.out))
    print(f"highest rate within the limits: {bracket.kept:.4g} requests/s ({options.out}/report.html)")
    sys.exit(document["exit_code"])


if __name__ == "__main__":
    main()
