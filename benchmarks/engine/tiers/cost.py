"""Owns the measurement of what tiers cost while nothing hits: steps with and without them, and of an older checkout.
Never runs a step itself: each engine has a process of its own, which waits while another one is measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.mixed import percentile
from benchmarks.engine.tiers.figures import NOT_MEASURED, shown, spread

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("worker.py")
OFF, AGAIN, BEFORE, HOST, BOTH = "off", "off again", "before", "host", "host and disk"
TEXTS = {
    OFF: "tiers off",
    AGAIN: "tiers off, a second process",
    BEFORE: "the commit before tiers",
    HOST: "host tier, nothing hit",
    BOTH: "host and disk tier, nothing hit",
}
MOST_OFF, MOST_ON = 1.01, 1.03
PAUSE_S = 0.1
"""What an engine still writes after its steps, some megabytes, ends meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLoad:
    """What each engine does in a round."""

    rows: int = 16
    context: int = 200
    steps: int = 32
    """Steps in which all rows decode. A multiple of the block size, so that each round stores as much."""
    prompt: int = 1024
    """Tokens of a prompt."""
    rounds: int = 40
    host_gib: float = 0.25
    disk_gib: float = 1.0


class Side:
    """An engine in its own process."""

    def __init__(self, name: str, checkout: Path, settings: Mapping[str, Any], load: CostLoad) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"settings": settings, "rows": load.rows, "context": load.context})

    def wait(self) -> None:
        self._read()

    def run(self, command: str, number: int) -> list[float]:
        """Return the milliseconds of the steps of a command.

        Raises:
            RuntimeError: the engine has failed; its output says why.
        """
        self._send([command, number])
        times: list[float] = json.loads(self._read())
        time.sleep(PAUSE_S)
        return times

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine {self.name!r} has ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        with self._process:  # it ends with its input
            pass


def measure_cost(load: CostLoad, against: Path | None, directory: Path | None = None) -> dict[str, Any]:
    """Measure all engines in turn, round by round. against: a checkout of the commit to compare with."""
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=directory))
        sides = []
        for name, checkout, tiers in _sides(load, against, path):
            sides.append(Side(name, checkout, {**_settings(load), **tiers}, load))
            stack.callback(sides[-1].close)
        for side in sides:
            side.wait()
        cells = [
            cell
            for command, number in (("decode", load.steps), ("prefill", load.prompt))
            for cell in _cells(command, run_rounds(sides, command, number, load.rounds))
        ]
    return {"rounds": load.rounds, "rows": load.rows, "prompt_tokens": load.prompt, "cells": cells}


def _sides(load: CostLoad, against: Path | None, path: str) -> list[tuple[str, Path, dict[str, Any]]]:
    host, disk = {"host_memory_gib": load.host_gib}, {"disk_path": path, "disk_gib": load.disk_gib}
    before = [] if against is None else [(BEFORE, against, dict[str, Any]())]
    return [
        (OFF, ROOT, {}),
        *before,
        (HOST, ROOT, {"kv_tiers": host}),
        (BOTH, ROOT, {"kv_tiers": host | disk}),
        (AGAIN, ROOT, {}),
    ]


def _settings(load: CostLoad) -> dict[str, Any]:
    most = load.context + load.rows + (load.steps + 8) * load.rounds
    return {
        "max_model_len": max(most, load.prompt + 1) + 16,
        "num_kv_blocks": load.rows * (most // 16 + 2) + load.prompt // 16 + 64,
        "max_num_seqs": load.rows,
        "max_num_batched_tokens": 256,
        "num_threads": os.cpu_count(),
    }


def run_rounds(sides: Sequence[Side], command: str, number: int, rounds: int) -> list[dict[str, float]]:
    """Return the mean milliseconds of a step by side, for each round. Each round begins with the next side."""
    found = []
    for turn in range(rounds):
        order = [sides[(turn + i) % len(sides)] for i in range(len(sides))]
        found.append({side.name: statistics.mean(side.run(command, number)) for side in order})
        print(command, {name: round(ms, 2) for name, ms in found[-1].items()}, flush=True)
    return found


def _cells(command: str, rounds: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Compare each side in each round with that without tiers, and that one with the commit before."""
    cells = []
    for name in rounds[0]:
        to = BEFORE if name == OFF else OFF
        ratios = [times[name] / times[to] for times in rounds if to in times and name != BEFORE]
        compared = {"to": to, "ratio": statistics.median(ratios), "quartiles": quartiles(ratios)} if ratios else {}
        cells.append({"step": command, "side": name, "step_ms": spread([times[name] for times in rounds]), **compared})
    return cells


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third."""
    return [percentile(values, share) for share in (0.25, 0.75)]


def worst(phase: Mapping[str, Any], sides: Sequence[str]) -> float | None:
    """Return the largest ratio of these engines; None if there is none."""
    return max((cell["ratio"] for cell in phase["cells"] if cell["side"] in sides and "to" in cell), default=None)


def table(phase: Mapping[str, Any] | None) -> str:
    """Render the table of steps while nothing hits: milliseconds, medians of the rounds with least and most, and the
    medians of the ratios with their quartiles."""
    if phase is None:
        return NOT_MEASURED
    lines = [f"{phase['rounds']} rounds.", "", "| step | engine | ms | ratio | to |", "|---|---|--:|--:|---|"]
    steps = {"decode": f"{phase['rows']} streams decode", "prefill": f"a prompt of {phase['prompt_tokens']:,} tokens"}
    for cell in phase["cells"]:
        ratio = to = "–"
        if "to" in cell:
            low, high = cell["quartiles"]
            ratio, to = f"{cell['ratio']:.3f} ({low:.3f}–{high:.3f})", TEXTS[cell["to"]]
        lines.append(
            f"| {steps[cell['step']]} | {TEXTS[cell['side']]} | {shown(cell['step_ms'], 1)} | {ratio} | {to} |"
        )
    return "\n".join(lines)
