"""Owns the program that measures lower tiers of KV in the engine alone: prompts that come back, agents, and the cost.
Never measures a phase that was not asked for: what its file has of others stays."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.engine.tiers import agents, cost, warm
from benchmarks.engine.tiers.driver import block_bytes, default_engine
from benchmarks.engine.tiers.trace import Shape, Turn, drawn, recorded
from benchmarks.machine import machine
from benchmarks.results import write_whole
from benchmarks.versions import short_name, worktree
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from serve_app.api.text.tokenizer import Tokenizer

PHASES = ("warm", "drawn", "recorded", "cost")


def measure(phase: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a phase's tables are made of, and where it was measured."""
    if phase == "warm":
        load = warm.WarmLoad(prompt=options.prompt)
        found = warm.measure_warm(default_engine, load, options.rounds, options.seed, options.directory)
    elif phase == "cost":
        sizes = cost.CostLoad(rounds=options.cost_rounds)
        with worktree(options.against) if options.against else nullcontext() as checkout:
            found = cost.measure_cost(sizes, checkout, options.directory)
    else:
        traces = [_trace(phase, options, options.seed + number) for number in range(options.rounds)]
        compared = agents.pools(options.hosts, options.few_rounds, options.dtypes if phase == "drawn" else ())
        found = agents.measure_trace(default_engine, phase, traces, compared, block_bytes())
    return {**machine(), "seed": options.seed, **found}


def _trace(name: str, options: argparse.Namespace, seed: int) -> list[Turn]:
    tokenizer = Tokenizer.from_dir(prepare_model(DEFAULT_MODEL, progress=False, stored=True, either=True))
    if name == "recorded":
        return recorded(tokenizer.encode, options.users, seed)
    return drawn(Shape.of(options.sessions, options.turns), tokenizer.vocab_size, seed)


def together(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the phases of an earlier one, and those that were measured now in their place."""
    phases = {**before.get("phases", {}), **found}
    return {"benchmark": "kv_tiers", "phases": {name: phases[name] for name in PHASES if name in phases}}


def table(document: Mapping[str, Any]) -> str:
    """Render the first table of docs/benchmarks/kv-tiers.md: what was aimed at, and what was measured."""
    lines = ["| what | aim | measured |", "|---|--:|--:|"]
    lines += [f"| {what} | {aim} | {'–' if value is None else value} |" for what, aim, value in _aims(document)]
    return "\n".join(lines)


def _aims(document: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    """Return (what, the aim, the figure)."""
    phases = document["phases"]
    found: list[tuple[str, str, str | None]] = []
    for name, text in warm.ROWS.items():
        value = f"{phases['warm'][f'{name}_ratio'][0]:.3f}" if "warm" in phases else None
        found.append((f"First token of a prompt that comes back ÷ computing it: {text}", f"≤ {warm.AIM:.2f}", value))
    cells = {cell["pool"]: cell for cell in phases["drawn"]["cells"]} if "drawn" in phases else {}
    ours = cells.get("value 1")
    hit = f"{ours['hit_share'][0]:.1%}".replace("%", " %") if ours else None
    ratio = f"{ours['ratio_p50'][0]:.2f}; {ours['ratio_p90'][0]:.2f}" if ours else None
    found.append(("Prompt tokens of agents' sessions that hit", f"≥ {agents.LEAST_HIT:.0%}".replace("%", " %"), hit))
    found.append(
        (
            "Their first tokens ÷ those with an unlimited pool, median and 90th percentile",
            f"≤ {agents.MOST_RATIO}",
            ratio,
        )
    )
    for text, sides, most in (
        ("A step with tiers off ÷ the commit before tiers", (cost.OFF,), cost.MOST_OFF),
        ("A step with tiers on, nothing hit ÷ tiers off", (cost.HOST, cost.BOTH), cost.MOST_ON),
    ):
        largest = cost.worst(phases["cost"], sides) if "cost" in phases else None
        found.append((f"{text}, the largest", f"≤ {most:.2f}", None if largest is None else f"{largest:.3f}"))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.against and not short_name(options.against):
        parser.error(f"--against: {options.against} is not a commit of this repository")
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.exists() else {}
    document = together(known, {})
    for phase in options.phases:
        document = together(document, {phase: measure(phase, options)})
        if options.out:
            write_whole(options.out, document)  # what was measured stays, whatever becomes of the next phase
    phases = document["phases"]
    tables = [table(document), warm.table(phases.get("warm"))]
    tables += [agents.table(phases.get(name)) for name in ("drawn", "recorded")]
    print(*tables, cost.table(phases.get("cost")), sep="\n\n")
    print(json.dumps(document))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.kv_tiers",
        description="Measure what lower tiers of KV bring and cost, with the default model and without a server. The "
        "last line is one JSON document.",
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="what is measured; all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `warm`, `drawn` and `recorded` (%(default)s)")
    parser.add_argument("--prompt", type=int, default=8000, help="`warm`: tokens of the prompt (%(default)s)")
    parser.add_argument("--sessions", type=int, default=6, help="`drawn`: number of sessions (%(default)s)")
    parser.add_argument("--turns", type=int, default=43, help="`drawn`: turns of each session (%(default)s)")
    parser.add_argument("--users", type=int, default=2, help="`recorded`: users who have each session (%(default)s)")
    parser.add_argument(
        "--hosts", type=float, nargs="+", default=[1.0], help="host tiers, as shares of the working set (%(default)s)"
    )
    parser.add_argument(
        "--few-rounds",
        type=int,
        default=1,
        help="rounds of a small pool alone, and of host tiers below 1 (%(default)s)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="*",
        choices=("int8", "fp8_e4m3"),
        default=["int8"],
        help="`drawn`: types of host tiers in 8 bits, which get half the bytes (int8)",
    )
    parser.add_argument("--cost-rounds", type=int, default=40, help="`cost`: number of rounds (%(default)s)")
    parser.add_argument("--against", help="`cost`: the commit before tiers; without it, it is not compared")
    parser.add_argument("--directory", type=Path, help="where files of disk tiers go; the system's temporary directory")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="write the document to this file, with what it has of other phases")
    return parser


if __name__ == "__main__":
    main()
