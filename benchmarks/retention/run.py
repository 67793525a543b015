"""Owns the study of what a tier keeps: by value, least recently used, and by one who knows the future.
Never measures time: it counts what prompts would find in caches of several sizes."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.results import write_whole
from benchmarks.retention.caches import COSTS, Found, furthest_next_use, one_pool, two_tiers
from benchmarks.retention.loads import Load, agents_load, trace_load
from engine.scheduling.by_value import ByValue
from engine.scheduling.retention import LeastRecent
from loadtest.sim.traces import trace_path
from loadtest.traces import read_trace

SIZES = (10, 25, 50, 100)
"""Percent of the working set."""
DEVICE = 25
"""The device's pool above a tier, likewise."""
TIERS = (25, 50, 100)
AGENTS = {"agents": False, "agents, one floods": True}
TRACES = {"Mooncake, conversations": "mooncake_conv", "Mooncake, synthetic": "mooncake_synth"}
SECONDS = 2400.0
BEST = "best"
ALONE = {"LRU": LeastRecent, "by value": ByValue}
TOGETHER = {
    "LRU, LRU": (LeastRecent, LeastRecent),
    "LRU, by value": (LeastRecent, ByValue),
    "by value, by value": (ByValue, ByValue),
}
"""Policies of the device and of the tier."""
Cell = dict[str, Any]


def load_of(name: str, seed: int | None) -> Load:
    """Make a load. Constants of the policy were chosen with other seeds, and with the first third of each trace.

    Raises:
        TraceMissingError: the trace is not there.
    """
    if seed is not None:
        return agents_load(seed, SECONDS, flooded=AGENTS[name])
    rows = read_trace(trace_path(TRACES[name])).rows
    return trace_load(name, rows, rows[-1].at_s / 3, float("inf"))


def cells_of(name: str, seed: int | None) -> list[Cell]:
    """Run one load on all caches."""
    load = load_of(name, seed)
    blocks = load.working_set()
    about = {"load": name, "seed": seed, "requests": len(load.turns), "working_set_tokens": blocks * load.block_tokens}
    return [{**about, **cell} for cell in (*_alone(load, blocks), *_together(load, blocks))]


def _alone(load: Load, blocks: int) -> Iterator[Cell]:
    for size in SIZES:
        room = blocks * size // 100
        yield {"size": size, "tier": 0, "policy": BEST, **_figures(furthest_next_use(load, room))}
        for policy, make in ALONE.items():
            yield {"size": size, "tier": 0, "policy": policy, **_figures(one_pool(load, room, make))}


def _together(load: Load, blocks: int) -> Iterator[Cell]:
    device = blocks * DEVICE // 100
    for size in TIERS:
        room = blocks * size // 100
        best = furthest_next_use(load, device + room)
        yield {"size": DEVICE, "tier": size, "policy": BEST, **_figures(best)}
        for policy, (above, below) in TOGETHER.items():
            found = two_tiers(load, device, room, above, below)
            yield {"size": DEVICE, "tier": size, "policy": policy, **_figures(found)}


def _figures(found: Found) -> Cell:
    shares = {tenant: round(hit / tokens, 4) for tenant, (tokens, hit) in sorted(found.by_tenant.items())}
    return {
        "hit_share": round(found.hit_tokens / found.tokens, 4),
        "saved_share": round(found.saved_s / found.seconds, 4),
        "hit_share_by_tenant": shares,
    }


# --- tables -----------------------------------------------------------------------------------------------------------

Figure = Callable[[Cell], float]


def _percent(cells: Sequence[Cell], figure: Figure) -> str:
    """Return the mean over the seeds, and the least and the most, in percent."""
    values = [100 * figure(cell) for cell in cells]
    spread = f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _rows(
    document: Mapping[str, Any], sizes: Sequence[tuple[int, int]], columns: Sequence[tuple[str, Figure]]
) -> Iterator[str]:
    """Yield a row for each load and pair of sizes, with a cell for each pair of a policy and a figure."""
    cells = document["cells"]
    for name in dict.fromkeys(cell["load"] for cell in cells):
        for size, tier in sizes:
            here = [cell for cell in cells if (cell["load"], cell["size"], cell["tier"]) == (name, size, tier)]
            found = [_percent([cell for cell in here if cell["policy"] == policy], get) for policy, get in columns]
            yield f"| {name} | {tier or size} | {' | '.join(found)} |"


def _hit(cell: Cell) -> float:
    return float(cell["hit_share"])


def _saved(cell: Cell) -> float:
    return float(cell["saved_share"])


def table(document: Mapping[str, Any]) -> str:
    """Render the first table of docs/benchmarks/retention.md: a pool alone."""
    names = [*ALONE, BEST]
    heads = [f"tokens: {name}" for name in names] + [f"time: {name}" for name in ALONE]
    lines = [f"| load | size, % | {' | '.join(heads)} |", f"|---|--:{'|--:' * len(heads)}|"]
    columns = [*((name, _hit) for name in names), *((name, _saved) for name in ALONE)]
    return "\n".join([*lines, *_rows(document, [(size, 0) for size in SIZES], columns)])


def tiers_table(document: Mapping[str, Any]) -> str:
    """Render the second one: a device and a tier."""
    names = [*TOGETHER, BEST]
    lines = [f"| load | tier, % | {' | '.join(names)} |", f"|---|--:{'|--:' * len(names)}|"]
    return "\n".join([*lines, *_rows(document, [(DEVICE, size) for size in TIERS], [(name, _hit) for name in names])])


def tenants_table(document: Mapping[str, Any]) -> str:
    """Render the third one: what each tenant finds in a pool alone of half the working set."""
    cells = [cell for cell in document["cells"] if (cell["size"], cell["tier"]) == (50, 0)]
    lines = ["| load | tenant | tokens: LRU | tokens: by value |", "|---|---|--:|--:|"]
    for name in dict.fromkeys(cell["load"] for cell in cells if cell["seed"] is not None):
        here = [cell for cell in cells if cell["load"] == name]
        for tenant in here[0]["hit_share_by_tenant"]:
            shares = [
                _percent([cell for cell in here if cell["policy"] == policy], _share_of(tenant)) for policy in ALONE
            ]
            lines.append(f"| {name} | {tenant} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _share_of(tenant: str) -> Figure:
    return lambda cell: float(cell["hit_share_by_tenant"][tenant])


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    asked = [(name, seed) for name in AGENTS for seed in options.seeds] + [(name, None) for name in TRACES]
    asked = [(name, seed) for name, seed in asked if name in options.loads]
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(pool.map(cells_of, *zip(*asked, strict=True)))
    document = {
        "benchmark": "retention",
        "commit": machine()["commit"],
        "simulated": True,
        "seeds": options.seeds,
        "seconds": SECONDS,
        "costs": asdict(COSTS),
        "cells": [cell for cells in found for cell in cells],
    }
    if options.out:
        write_whole(options.out, document)
    print(f"{table(document)}\n\n{tiers_table(document)}\n\n{tenants_table(document)}")
    print(json.dumps(document))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.retention.run",
        description="Count what prompts find in caches that keep blocks by value, by age, or with knowledge of the "
        "future.",
    )
    names = [*AGENTS, *TRACES]
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[time.time_ns() % 1_000_000],
        help="seeds of the agents' loads; another one each time if not given",
    )
    parser.add_argument("--loads", nargs="+", choices=names, default=names, help="loads (all of them)")
    parser.add_argument("--processes", type=int, default=1, help="loads at a time (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes is 1 or more, not {options.processes}")
    return options


if __name__ == "__main__":
    main()
