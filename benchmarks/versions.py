"""Owns the comparison of two commits: the engine's benchmarks run in each in turn, and their times are divided.
Never measures anything itself, and never changes your checkout: each commit gets a temporary worktree."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.results import write_whole


@dataclass(frozen=True, slots=True)
class Program:
    """One benchmark, which prints one JSON document as its last line."""

    name: str
    modules: Mapping[str, tuple[str, ...]]
    """The names that its module has had, the newest first, each with options that only this one knows."""
    options: tuple[str, ...]

    def command(self, checkout: Path) -> list[str]:
        """Return the command that runs it in a checkout.

        Raises:
            FileNotFoundError: the checkout has none of its modules.
        """
        for module, own in self.modules.items():
            if (checkout / (module.replace(".", "/") + ".py")).exists():
                return [sys.executable, "-m", module, *self.options, *own]
        raise FileNotFoundError(f"{checkout} has none of the modules {', '.join(self.modules)}")


PROGRAMS = (
    Program(
        "step",
        {"benchmarks.engine.step": (), "engine.bench_step": ()},
        ("--kernels", "native", "--rows", "1", "16", "--prefill", "256", "--loop", "16", "--rounds", "1"),
    ),
    Program(
        "scheduler",
        {"benchmarks.engine.scheduler": ("--storms", "0"), "engine.bench_scheduler": ()},
        ("--running", "64", "512", "--waiting", "100", "2000"),
    ),
)
Key = tuple[str, ...]
Times = dict[Key, float]
"""The median milliseconds of each cell."""


def times_of(name: str, document: Mapping[str, Any]) -> Times:
    """Return the times of a document of the program `name`."""
    found = {}
    for cell in (*document["cells"], *document.get("loops", ())):
        told = [f"{key} {value}" for key, value in cell.items() if not key.endswith("_percent") and "ms" not in key]
        found[(name, *told)] = cell["ms_p50"] if "ms_p50" in cell else cell["step_ms"]
    return found


def run_all(checkout: Path, programs: Sequence[Program], seed: int) -> Times:
    """Run all programs once in a checkout.

    Raises:
        RuntimeError: one has failed, with the end of what it said.
    """
    times: Times = {}
    for program in programs:
        command = [*program.command(checkout), "--seed", str(seed)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{program.name} failed in {checkout}: {done.stderr[-2000:]}")
        times |= times_of(program.name, json.loads(done.stdout.splitlines()[-1]))
    return times


def compared(before: Sequence[Times], after: Sequence[Times]) -> list[dict[str, Any]]:
    """Compare rounds, where `before[i]` and `after[i]` were measured one after the other. Cells that only one of the
    commits has are left out."""
    rows = []
    for key in after[0]:
        if key not in before[0]:
            continue
        ratios = [new[key] / old[key] for old, new in zip(before, after, strict=True)]
        rows.append(
            {
                "cell": ", ".join(key),
                "before_ms": round(statistics.median(old[key] for old in before), 4),
                "after_ms": round(statistics.median(new[key] for new in after), 4),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
            }
        )
    return rows


def table(document: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown table."""
    lines = ["| cell | before, ms | after, ms | after / before (least–most) |", "|---|--:|--:|--:|"]
    for row in document["cells"]:
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"
        lines.append(f"| {row['cell']} | {row['before_ms']:.3g} | {row['after_ms']:.3g} | {ratio} |")
    return "\n".join(lines)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check a commit out in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        path = Path(folder) / "checkout"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], check=True)


def short_name(commit: str) -> str:
    """Return the short hash of a commit; "" if there is none of this name."""
    command = ["git", "rev-parse", "--quiet", "--verify", "--short", f"{commit}^{{commit}}"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None, programs: Sequence[Program] = PROGRAMS) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versions",
        description="Run the engine's benchmarks in two commits in turn, and print the ratios of their times.",
    )
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("after", nargs="?", default="HEAD", help="the commit to compare (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each commit (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    names = {}
    for commit in (options.before, options.after):
        names[commit] = short_name(commit)
        if not names[commit]:
            parser.error(f"{commit} is not a commit of this repository")
    before: list[Times] = []
    after: list[Times] = []
    with worktree(options.before) as old, worktree(options.after) as new:
        for number in range(options.rounds):
            sides = [(old, before), (new, after)]
            for checkout, times in sides if number % 2 == 0 else sides[::-1]:
                times.append(run_all(checkout, programs, seed=number))
    document = {
        "benchmark": "versions",
        **machine(),
        "before": names[options.before],
        "after": names[options.after],
        "rounds": options.rounds,
        "cells": compared(before, after),
    }
    if options.out:
        write_whole(options.out, document)
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
