"""Owns the long runs of the engine's state machines, new lives each time, and their record: `python -m tests.deep`.
Never records a failure as a success: a life that breaks an invariant ends the run, and the record stays as it was."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.machine import machine
from tests.engine.test_lockstep_lives import THINGS as OF_LOCKSTEP
from tests.engine.test_lockstep_lives import LockstepMachine
from tests.engine.test_state_machine import EngineMachine, TiersMachine
from tests.support.invariants import CheckedCore

RECORD = Path(__file__).with_name("deep.json")
ENGINE, TIERS, LOCKSTEP = "engine", "tiers", "lockstep"
MACHINES: Mapping[str, type[EngineMachine]] = {
    ENGINE: EngineMachine,
    TIERS: TiersMachine,
    LOCKSTEP: LockstepMachine,
}
LIVES = 1000
"""Lives in one batch, which has a seed of its own."""
USUAL = {ENGINE: 100 * LIVES, TIERS: 10 * LIVES, LOCKSTEP: 5 * LIVES}
RULES = 12
"""Rules applied in a life before it runs to its end: half as many as in `make test`, so that there are many lives."""
OF_TIERS = ("loaded", "load failed", "offloaded", "evicted from a tier", "lost by a tier")
"""What lives with tiers must reach, and what the others seldom do."""
OF_ONE_ENGINE = tuple(thing for thing in CheckedCore.THINGS if thing not in OF_TIERS)
MUST_REACH = {ENGINE: OF_ONE_ENGINE, TIERS: OF_TIERS, LOCKSTEP: (*OF_ONE_ENGINE, *OF_LOCKSTEP)}


def run_batch(machine_name: str, number: int) -> Counter[str]:
    """Count in how many of the batch's lives each of the machine's things happened."""
    logging.disable(logging.CRITICAL)  # injected failures log a traceback each
    EngineMachine.reached.clear()
    options = settings(
        max_examples=LIVES,
        stateful_step_count=RULES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(MACHINES[machine_name]), settings=options)
    return Counter(EngineMachine.reached)


def run(machine_name: str, lives: int, first_seed: int) -> dict[str, object]:
    """Run so many lives, rounded up to batches, and return the record."""
    batches = -(-lives // LIVES)
    started, reached = time.monotonic(), Counter[str]()
    # Each batch has a new process: hypothesis keeps what it has seen, and slows down.
    spawn = multiprocessing.get_context("spawn")
    numbers = range(first_seed, first_seed + batches)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for done, found in enumerate(pool.map(partial(run_batch, machine_name), numbers), 1):
            reached += found
            print(f"{machine_name}: {done * LIVES} lives, {time.monotonic() - started:.0f} s", flush=True)
    never = [thing for thing in MUST_REACH[machine_name] if not reached[thing]]
    assert not never, f"never happened: {never}"
    seconds = round(time.monotonic() - started)
    record = {"lives": batches * LIVES, "rules": RULES, "seed": first_seed, "seconds": seconds, "failed": 0}
    things = dict.fromkeys((*CheckedCore.THINGS, *MUST_REACH[machine_name]))
    return {**record, **machine(), "lives_with": {thing: reached[thing] for thing in things}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.deep",
        description="Run the engine's state machines for 100,000 random lives, for 10,000 in caches that are too small "
        "and have lower tiers, and for 5,000 of 2 to 4 ranks in lockstep, and record the results in tests/deep.json.",
    )
    parser.add_argument("--machine", nargs="+", choices=list(MACHINES), default=list(MACHINES), help="which lives; all")
    parser.add_argument("--lives", type=int, help=f"of each machine, rounded up to batches of {LIVES}")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_000)
    options = parser.parse_args(arguments)
    for name in options.machine:
        lives = USUAL[name] if options.lives is None else options.lives
        found = run(name, lives, options.seed)
        records = {**json.loads(RECORD.read_text()), name: found}
        RECORD.write_text(json.dumps({name: records[name] for name in MACHINES if name in records}, indent=2) + "\n")
    print(RECORD.read_text())


if __name__ == "__main__":
    main()
