"""Owns the command that simulates a named load, with the options, plan, verdict and report of loadtest.load.
Never leaves out a part of a load: loads with a part that is not simulated (clients that disconnect or do not read,
tenants) are refused."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, ResolvedConfig
from loadtest.options import add_options, goal_from, plan_from, seed_of
from loadtest.plan import Plan, Replay
from loadtest.report import Document, verdict, write
from loadtest.sim.driver import PlanDriver
from loadtest.sim.routers import ROUTERS, Router
from loadtest.sim.scenario import Scenario, engine_config
from loadtest.sim.simulation import simulate
from loadtest.sim.step_time import MEASURED, measured
from loadtest.sim.summary import report
from loadtest.sim.world import World

_OF_A_SERVER = ("model", "keys", "do", "do_at", "settle", "max_lag_ms", "max_cpu", "request_timeout")
"""Options of a load that have no meaning in a simulation."""
_OF_AN_ENGINE = (
    *("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "max_queued_requests"),
    *("num_kv_blocks", "block_size", "max_model_len"),
)
_SHOWN = ("seconds", "warm_up", "rate", "rates", "clients", "arrivals", "cv", "lengths", "longest", "trace", "goal")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m loadtest.sim.load",
        description="Simulate a named load on engines of this project and write the same report as loadtest.load. What "
        "is not simulated is refused: clients that disconnect or read too slowly, and tenants.",
        allow_abbrev=False,
    )
    add_options(made)
    add_deployment(made)
    return made


def add_deployment(made: argparse.ArgumentParser) -> None:
    """Add the options that a load on a real server does not have."""
    made.add_argument("--replicas", type=int, default=1, help="number of engines (%(default)s)")
    made.add_argument(
        "--router",
        choices=[*ROUTERS],
        default="prefix-affine",
        help="policy that chooses the engine of a request (%(default)s)",
    )
    made.add_argument(
        "--engine", default="", help="further settings of each engine: max_num_seqs=16,num_kv_blocks=5825"
    )
    made.add_argument(
        "--steps",
        type=Path,
        default=MEASURED,
        help="output of benchmarks.engine.step or .step_model, which say how long steps take on their machine; "
        "loadtest/results/gpu.json: an 8B model on an H200",
    )


def check(options: argparse.Namespace) -> tuple[Plan, ResolvedConfig]:
    """Raises: ValueError: the options are invalid, or the load cannot be simulated. OSError: the trace cannot be
    read."""
    made = parser()
    for name in _OF_A_SERVER:
        if getattr(options, name) != made.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} needs a real server; a simulation sends nothing")
    if options.replicas < 1:
        raise ValueError(f"--replicas is 1 or more, not {options.replicas}")
    plan = plan_from(options)
    for lack in _lacks(plan):
        raise ValueError(f"{options.scenario} is not simulated: {lack}")
    config = engine_config(**dict(_whole_numbers(options.engine)))
    EngineConfig(**{name: getattr(config, name) for name in _OF_AN_ENGINE})  # checks rules of its own
    return plan, config


def _lacks(plan: Plan) -> Iterator[str]:
    shapes = [source.shape for point in plan.points for source in point.sources if not isinstance(source, Replay)]
    if any(shape.cancel_share for shape in shapes):
        yield "its clients leave"
    if any(shape.read_pause_s for shape in shapes):
        yield "its clients read slowly"
    if any(shape.tenant for shape in shapes):
        yield "it has tenants"
    if plan.settles:
        yield "what the server holds afterwards is part of it"


def _whole_numbers(text: str) -> Iterator[tuple[str, int]]:
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in _OF_AN_ENGINE or not value.isdecimal():
            raise ValueError(f"--engine is NAME=NUMBER, NAME one of {', '.join(_OF_AN_ENGINE)}, not {part!r}")
        yield name, int(value)


def simulated(plan: Plan, scenario: Scenario, router: Callable[[int, int], Router]) -> World:
    """Simulate all points of a plan, one after the other, in one world."""

    async def send(world: World) -> None:
        await PlanDriver(plan, world, scenario.seed).run()

    return simulate(scenario, lambda: router(scenario.seed, scenario.config.block_size), send=send)[1]


def run(options: argparse.Namespace) -> Document:
    """Simulate the load of the options and return its report. Raises as `check`; ValueError: the steps fit no model."""
    plan, config = check(options)
    seed = seed_of(options)
    step_time, _ = measured(options.steps)
    scenario = Scenario(
        jobs=(),
        step_time=step_time,
        goal=goal_from(options),
        config=config,
        replicas=options.replicas,
        prefill_tokens_per_s=step_time.prefill_tokens_per_s,
        duration_s=sum(point.seconds for point in plan.points),
        seed=seed,
    )
    logging.getLogger("serve_app").setLevel(logging.ERROR)  # thousands of simulated moves would fill the log
    world = simulated(plan, scenario, ROUTERS[options.router])
    shown: dict[str, Any] = {name: getattr(options, name) for name in (*_SHOWN, "replicas", "router", "engine")}
    return report(world, options.scenario, {**shown, "seed": seed}, plan)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser()
    options = made.parse_args(arguments)
    try:
        document = run(options)
    except (ValueError, OSError) as wrong:
        made.error(str(wrong))
    write(document, Path(options.out))
    print("\n".join([*verdict(document), "all of it simulated", str(Path(options.out) / "report.html")]))
    sys.exit(document["exit_code"])


if __name__ == "__main__":
    main()
