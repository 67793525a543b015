"""Owns the comparison of the simulator with a live server under the same closed loads, figure by figure.
Never fits anything to the server: the step times are those of the engine alone, measured on another day."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

from loadtest.marks import with_text
from loadtest.sim.plots import README
from loadtest.sim.routers import RoundRobin
from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.specs import LONG_PROMPTS
from loadtest.sim.step_time import measured
from loadtest.sim.studies import RESULTS
from loadtest.sim.virtual_loop import run
from loadtest.sim.workload import Job
from loadtest.sim.world import KIND, POINT, World

LIVE = RESULTS / "peers.json"
"""From `make bench-peers`: HAProxy, the ingress, the token channel and the engine on two cores."""
STEPS = RESULTS / "engine_step.json"
"""Step times of the engine alone, on the same kind of machine as LIVE."""
LOADS = {"single": "alone", "closed": "16 clients"}
"""The loads with equal requests whose prompts share nothing."""
FIGURES = {
    "ttft_ms": ("ttft_p50_ms", "first token, ms"),
    "tpot_ms": ("tpot_p50_ms", "ms a token"),
    "tokens_per_s": ("output_tokens_per_s", "tokens/s"),
}
"""By name in LIVE: the figure's name in a simulation, and its title."""
ENGINE = {"max_num_batched_tokens": 128, "max_prefill_tokens": 128, "num_kv_blocks": 5825, "max_model_len": 4096}
"""The engine settings of config.yaml when LIVE was measured."""


def live_figures(results: Mapping[str, Any], load: str) -> dict[str, float]:
    """Return our server's medians over the rounds, without drafts: a simulation cannot know which drafts are right."""
    rounds = [one_round["chunkserve-no-drafts"]["scenarios"][load] for one_round in results["rounds"]]
    return {name: statistics.median(figures[name] for figures in rounds) for name in FIGURES}


def simulated_figures(load: Mapping[str, int]) -> dict[str, float]:
    """Simulate clients that send their next request as soon as they are answered."""
    world = run(_closed(load))
    return {name: world.tally.figures(POINT)[simulated] for name, (simulated, _) in FIGURES.items()}


async def _closed(load: Mapping[str, int]) -> World:
    step_time, _ = measured(STEPS)
    jobs = [Job(0.0, load["prompt"], load["answer"]) for _ in range(load["requests"])]
    scenario = Scenario(jobs=jobs, step_time=step_time, goal=LONG_PROMPTS, config=engine_config(**ENGINE))
    world = World(scenario, RoundRobin())
    world.deployment.scale(1, warm=True)
    waiting = list(enumerate(jobs))

    async def run_client() -> None:
        while waiting:
            number, job = waiting.pop()
            world.tally.record(POINT, KIND, await world.serve(job, number), (0.0, math.inf))

    await asyncio.gather(*(run_client() for _ in range(load["clients"])))
    world.tally.open_window(POINT, world.loop.time())  # the window of a closed load ends with its last answer
    return world


def compare(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each figure of each load: the measured value, the simulated value, and their ratio."""
    rows = []
    for load in LOADS:
        live, simulated = live_figures(results, load), simulated_figures(results["scenarios"][load])
        for figure in FIGURES:
            ratio = simulated[figure] / live[figure]
            row = {"measured": live[figure], "simulated": simulated[figure], "ratio": ratio}
            rows.append({"load": load, "figure": figure, **row})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | measured | simulated | simulated ÷ measured |", "|---|---|---|---|"]
    for row in rows:
        name = f"{LOADS[row['load']]}: {FIGURES[row['figure']][1]}"
        lines.append(f"| {name} | {row['measured']:.0f} | {row['simulated']:.0f} | {row['ratio']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m loadtest.sim.validation",
        description="Compare the simulator with a live server under the same closed loads, and write the table into "
        "loadtest/sim/README.md.",
    ).parse_args()
    README.write_text(with_text(README.read_text(), "validation", table(compare(json.loads(LIVE.read_text())))))
