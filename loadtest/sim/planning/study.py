"""Owns the comparison of plans with a sweep of all settings and numbers of replicas, on three traces.
Never gives the sweep other requests than the plan: both have the same seeds, and fresh ones judge both."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from loadtest.sim.planning.choices import Choices, settings_of
from loadtest.sim.planning.demand import Recorded
from loadtest.sim.planning.evaluate import Case, Result, Settings, Simulations, Task
from loadtest.sim.planning.machine import Engine, Machine, read_machine
from loadtest.sim.planning.plan import Limits, Plan, make_plan
from loadtest.sim.planning.search import Trial
from loadtest.sim.studies import RESULTS, current_commit
from loadtest.sim.traces import trace_path
from loadtest.slo import Goal
from loadtest.traces import Trace, read_trace

STEPS = RESULTS / "step_model.json"
WANTED = 0.9
WITHIN = 0.05
"""How much dearer a plan may be than the best of the sweep, and how much less good."""
SEEDS = 2
MOST = 6
VALUES = 2
"""Values of each number that are swept."""


@dataclass(frozen=True, slots=True)
class Load:
    """A trace at a rate that takes a handful of replicas, on a machine that is `speed` times as fast as measured, with
    a goal that it can keep."""

    rate: float
    goal: Goal
    speed: float
    seconds: float


LOADS = {
    "azure_conv": Load(0.6, Goal(ttft_ms=10_000, tpot_ms=150), 1.0, 45.0),
    "azure_code": Load(1.5, Goal(ttft_ms=4000, tpot_ms=100), 10.0, 90.0),
    "mooncake_conv": Load(0.3, Goal(ttft_ms=20_000, tpot_ms=150), 24.0, 70.0),
}
ENGINE = Engine(kv_tokens=262_144, max_model_len=131_072, block_size=64)


def case_of(trace: Trace, load: Load, seeds: int = SEEDS) -> Case:
    """Return the case of a load. Its trace has as many stretches again for fresh seeds."""
    demand = Recorded.of(trace, longest=ENGINE.longest, num_stretches=2 * seeds, rate=load.rate)
    machine = faster(read_machine(STEPS), load.speed)
    return Case(demand, machine, ENGINE, load.goal, load.seconds, few=min(2, seeds), all=seeds)


def faster(machine: Machine, times: float) -> Machine:
    """Return a machine that takes so many times less for everything. There is no such machine."""
    costs = machine.costs
    factors = {name: getattr(costs, name) / times for name in ("sample_s", "key_s", "attended_s", "encoded_s")}
    sped = replace(costs, curve_s=tuple(second / times for second in costs.curve_s), **factors)
    return replace(machine, name=f"{machine.name}, {times:g} times as fast", costs=sped)


def compare(case: Case, simulations: Simulations, limits: Limits) -> dict[str, Any]:
    """Make a plan, and sweep all settings with up to as many replicas as it has: more would only cost more."""
    choices = Choices(case.machine, case.engine, case.goal, case.demand, EngineConfig(), VALUES)
    began = time.monotonic()
    plan = make_plan(case, limits, choices, simulations)
    planned_s = time.monotonic() - began
    trials = [
        Trial(settings, replicas, thorough=True)
        for settings in choices.every()
        for replicas in range(limits.least, plan.trial.replicas + 1)
    ]
    results = dict(zip(trials, simulations.evaluate(trials), strict=True))
    best = best_of(results, limits.wanted)
    return {
        "plan": _shown(plan.trial, plan.result),
        "best": _shown(best, results[best]),
        "cost_ratio": plan.trial.replicas / best.replicas,
        "goodput_ratio": plan.result.goodput_per_s / results[best].goodput_per_s,
        "fresh": {name: _fresh(simulations, case, trial) for name, trial in (("plan", plan.trial), ("best", best))},
        "highest_rate_per_s": plan.highest_load * case.demand.rate,
        "planned_s": planned_s,
        "trials": {"plan": plan.num_trials, "sweep": len(trials)},
        "swept": settings_of(choices.every()),
        "sweep": [_row(trial, result) for trial, result in results.items()],
    } | _unheld(plan)


def _unheld(plan: Plan) -> dict[str, Any]:
    return {} if plan.is_held else {"unheld": True}


def best_of(results: dict[Trial[Settings], Result], wanted: float) -> Trial[Settings]:
    """Return the cheapest trial that holds what is wanted, and of those the one with the most good answers; if none
    holds it, the one with the most good answers."""
    held = {trial: result for trial, result in results.items() if result.good_share >= wanted}
    fewest = min((trial.replicas for trial in held), default=0)
    rivals = {trial: result for trial, result in held.items() if trial.replicas == fewest} or results
    return max(rivals, key=lambda trial: rivals[trial].goodput_per_s)


def _fresh(simulations: Simulations, case: Case, trial: Trial[Settings]) -> float:
    """Return the share of good answers with seeds that neither the plan nor the sweep had."""
    (result,) = simulations.results([[Task(trial, case.all + seed) for seed in range(case.all)]])
    return result.good_share


def _shown(trial: Trial[Settings], result: Result) -> dict[str, Any]:
    shown = {"replicas": trial.replicas, **asdict(trial.settings)}
    return shown | {"good_share": result.good_share, "goodput_per_s": result.goodput_per_s}


def _row(trial: Trial[Settings], result: Result) -> list[Any]:
    return [
        *asdict(trial.settings).values(),
        trial.replicas,
        round(result.good_share, 5),
        round(result.goodput_per_s, 4),
    ]


def is_within(compared: dict[str, Any]) -> bool:
    return bool(compared["cost_ratio"] <= 1 + WITHIN and compared["goodput_ratio"] >= 1 - WITHIN)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.sim.planning.study",
        description="Compare plans with an exhaustive sweep on three traces: what each costs, and how many answers are "
        "good. Takes ten minutes on two cores, and the traces of loadtest/sim/README.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--traces", nargs="+", choices=[*LOADS], default=[*LOADS], help="which traces (all)")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "plan.json", help="JSON file for the result")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes is 1 or more, not {options.processes}")
    document: dict[str, Any] = {"study": "plan", "simulated": True, "wanted": WANTED, "seeds": SEEDS}
    document |= {"commit": current_commit(), "steps": STEPS.name, "engine": asdict(ENGINE), "loads": {}}
    for name in options.traces:
        load = LOADS[name]
        case = case_of(read_trace(trace_path(name)), load)
        with Simulations(case, options.processes) as simulations:
            compared = compare(case, simulations, Limits(WANTED, most=MOST))
        document["loads"][name] = {"load": asdict(load), **compared}
        print(
            f"{name}: cost {compared['cost_ratio']:.3f}, goodput {compared['goodput_ratio']:.3f} of the best",
            flush=True,
        )
        options.out.write_text(_text(document))
    if not all(map(is_within, document["loads"].values())):
        raise SystemExit(f"a plan is not within {WITHIN:.0%} of the sweep")


def _text(document: dict[str, Any]) -> str:
    """Return the document with each row of a sweep in a line."""
    rows = {name: load["sweep"] for name, load in document["loads"].items()}
    loads = {name: {**load, "sweep": f"@{name}"} for name, load in document["loads"].items()}
    text = json.dumps({**document, "loads": loads}, indent=1)
    for name, sweep in rows.items():
        lines = ",\n".join(f"    {json.dumps(row)}" for row in sweep)
        text = text.replace(f'"@{name}"', f"[\n{lines}\n   ]")
    return text + "\n"


if __name__ == "__main__":
    main()
