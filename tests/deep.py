"""Owns the long run of the engine's state machine, with new lives each time, and its record: `python -m tests.deep`.
Never records a failure as a success: a life that breaks an invariant ends the run, and the record stays as it was."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks.machine import machine
from tests.engine.test_state_machine import EngineMachine
from tests.support.invariants import CheckedCore

RECORD = Path(__file__).with_name("deep.json")
LIVES = 1000
"""Lives in one batch, which has a seed of its own."""
RULES = 12
"""Rules applied in a life before it runs to its end: half as many as in `make test`, so that there are many lives."""


def run_batch(number: int) -> Counter[str]:
    """Count in how many of the batch's lives each of CheckedCore.THINGS happened."""
    logging.disable(logging.CRITICAL)  # injected failures log a traceback each
    EngineMachine.reached.clear()
    options = settings(
        max_examples=LIVES,
        stateful_step_count=RULES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(EngineMachine), settings=options)
    return Counter(EngineMachine.reached)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.deep",
        description="Run the engine's state machine for 100,000 random lives, and record the result in "
        "tests/deep.json.",
    )
    parser.add_argument("--lives", type=int, default=100 * LIVES, help=f"rounded up to batches of {LIVES}")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000_000)
    options = parser.parse_args(arguments)
    batches = -(-options.lives // LIVES)
    started, reached = time.monotonic(), Counter[str]()
    # Each batch has a new process: hypothesis keeps what it has seen, and slows down.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for done, found in enumerate(pool.map(run_batch, range(options.seed, options.seed + batches)), 1):
            reached += found
            print(f"{done * LIVES} lives, {time.monotonic() - started:.0f} s", flush=True)
    never = [thing for thing in CheckedCore.THINGS if not reached[thing]]
    assert not never, f"never happened: {never}"
    record = {
        "lives": batches * LIVES,
        "rules": RULES,
        "seed": options.seed,
        "seconds": round(time.monotonic() - started),
    }
    lives = {thing: reached[thing] for thing in CheckedCore.THINGS}
    RECORD.write_text(json.dumps({**record, "failed": 0, **machine(), "lives_with": lives}, indent=2) + "\n")
    print(RECORD.read_text())


if __name__ == "__main__":
    main()
