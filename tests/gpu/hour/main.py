"""Owns the hour's command: which phases run, for how long, and its exit status.
Never imports torch: a part can break only its own process."""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.gpu.hour.phases import CUDA, STAND_IN, Phase, phases
from tests.gpu.hour.running import ROOT, Outcome, Part, run_part
from tests.gpu.hour.store import Store
from tests.gpu.hour.table import aims_of, lines_of

NO_DEVICE = 2
FAULTS = {
    "raise": "raise RuntimeError('injected')",
    "hang": "import signal; signal.pause()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}
SEES_A_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else f'torch {torch.__version__} sees no GPU')"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hour and return its exit status. 0: every part passed. 1: some did not, or results could not be kept.
    2: there is nothing to run on, or nowhere to keep results."""
    options = _options(arguments)
    if why := _why_not(options):
        print(f"first_hour: {why}", file=sys.stderr)
        return NO_DEVICE
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # parts are still ended, and the table written
    every = phases(options.device, options.again)
    chosen = [phase for phase in every if phase.name in options.phases]
    store = Store(options.out, [phase.name for phase in every], options.device)
    with tempfile.TemporaryDirectory(prefix="first-hour-") as scratch:
        hour = Hour(store, Path(scratch), options)
        try:
            for phase in chosen:
                hour.run(phase)
        finally:
            unwritten = hour.end(every)
            signal.signal(signal.SIGTERM, before)
    failed = any(not outcome.passed for phase in chosen for outcome in store.outcomes[phase.name].values())
    return 1 if failed or unwritten else 0


class Hour:
    """One run of the script."""

    def __init__(self, store: Store, scratch: Path, options: argparse.Namespace) -> None:
        self._store, self._scratch, self._options = store, scratch, options
        whole = sum(phase.minutes for phase in phases(CUDA) if phase.name in options.phases)
        self._stretch = 1.0 if options.minutes is None else options.minutes / whole

    def run(self, phase: Phase) -> None:
        """Run a phase's parts one after another, each within its own limit and the phase's."""
        until = time.monotonic() + 60 * phase.minutes * self._stretch
        print(f"=== {phase.name}: {phase.title} ({60 * phase.minutes * self._stretch:.0f} s)", flush=True)
        more = {"prediction": self._options.prediction} if phase.name == "rest" else {}
        self._store.begin(phase.name, keep=bool(self._options.parts), **more)
        for part in phase.parts:
            if self._options.parts and part.name not in self._options.parts:
                continue
            limit_s = min(part.limit_s * max(1.0, self._stretch), until - time.monotonic())
            if limit_s <= 0:
                outcome = Outcome(part.name, "not reached", "the phase's time was spent before")
            else:
                outcome = self._run(phase, part, limit_s)
            outcome = self._store.keep(phase.name, outcome)
            print(f"{outcome.name}: {outcome.word} {outcome.why}".rstrip(), flush=True)
            if outcome.tail:
                print(outcome.tail, flush=True)

    def _run(self, phase: Phase, part: Part, limit_s: float) -> Outcome:
        """Run a part. Failing to start is an outcome, too."""
        print(f"--- {part.name} (at most {limit_s:.0f} s)", flush=True)
        fault = self._options.faults.get(part.name)
        if fault is not None:
            part = dataclasses.replace(part, command=[sys.executable, "-c", FAULTS[fault]])
        try:
            return run_part(part, limit_s, self._scratch, partial(self._store.keep, phase.name))
        except OSError as error:
            return Outcome(part.name, "failed", str(error), limit_s=limit_s)

    def end(self, every: Sequence[Phase]) -> str:
        """Print the table and keep it. Return why it could not be kept, or an empty string."""
        store = self._store
        words = {name: {each.name: each.word for each in found.values()} for name, found in store.outcomes.items()}
        machine = store.result("right", "machine") or {}
        device = self._options.device
        mode = machine.get("mode", {}).get("device", "unknown")
        heading = f"FIRST HOUR ON {mode}" if device == CUDA else "FIRST HOUR, REHEARSED WITHOUT A GPU: NO FIGURE COUNTS"
        table = "\n".join(lines_of(every, store, heading))
        aims = [aim._asdict() for aim in aims_of(store)]
        summary = {"mode": machine.get("mode"), "peaks": machine.get("peaks"), "outcomes": words, "aims": aims}
        unwritten = store.end(summary, table)
        print(table)
        if unwritten:
            print(f"The summary is not kept: {unwritten}", flush=True)
        return unwritten


def _why_not(options: argparse.Namespace) -> str:
    """Return in one line why nothing can run, or an empty string."""
    if options.device == CUDA:
        asked = subprocess.run(
            [sys.executable, "-c", SEES_A_GPU], capture_output=True, text=True, cwd=ROOT, check=False
        )
        if asked.returncode:
            why = (asked.stderr.strip().splitlines() or ["torch cannot be asked for a GPU"])[-1]
            return f"{why}; --device {STAND_IN} rehearses without one"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        return f"--out {options.out}: {error}"
    return ""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="first_hour.py",
        description="Spend the first hour on a GPU: is it right, where is the time, are the aims met. It needs no "
        "network and no installation: a python3 with torch, Triton, transformers and pytest. Each part is a process "
        "of its own with a limit. What is kept of a phase that does not run stays.",
    )
    names = [phase.name for phase in phases(STAND_IN)]
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for results: a file for each phase and two more"
    )
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=names,
        metavar="PHASE",
        help=f"of {', '.join(names)}; all but rest, which is run with --again",
    )
    parser.add_argument("--parts", nargs="+", metavar="PART", default=[], help="of these phases; all")
    parser.add_argument("--minutes", type=_minutes, help="for all phases together (8, 9, 9 and 4 for each)")
    parser.add_argument("--again", metavar="PART", help="a part that `rest` runs once more, after a change")
    parser.add_argument("--prediction", default="", help="what --again is expected to show, kept before it runs")
    parser.add_argument(
        "--device",
        default=CUDA,
        choices=[CUDA, STAND_IN],
        help="stand-in: rehearse all of it on a processor, in tiny shapes (%(default)s)",
    )
    parser.add_argument(
        "--fault",
        nargs="+",
        default=[],
        metavar="PART=FAULT",
        help=f"for a rehearsal: let parts fail; {', '.join(FAULTS)}",
    )
    options = parser.parse_args(arguments)
    try:
        every = phases(options.device, options.again)
    except ValueError as error:
        parser.error(str(error))
    options.phases = options.phases or [name for name in names if name != "rest" or options.again]
    if "rest" in options.phases and options.again is None:
        parser.error("--phases rest needs --again, the part that it runs once more")
    known = [part.name for phase in every for part in phase.parts if phase.name in options.phases]
    options.faults = dict(each.partition("=")[::2] for each in options.fault)
    for name in (*options.parts, *options.faults):
        if name not in known:
            parser.error(f"part {name!r}: expected one of {', '.join(known)}")
    if options.faults and options.device == CUDA:
        parser.error(f"--fault is for a rehearsal: --device {STAND_IN}")
    if unknown := sorted(set(options.faults.values()) - set(FAULTS)):
        parser.error(f"--fault {unknown[0]!r}: expected one of {', '.join(FAULTS)}")
    return options


def _minutes(text: str) -> float:
    found = float(text)
    if not (math.isfinite(found) and found > 0):
        raise argparse.ArgumentTypeError(f"{text}: expected more than 0")
    return found
