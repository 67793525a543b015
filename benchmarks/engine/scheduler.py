"""Owns the offline measurement of scheduling: how long steps take to plan, to commit and to apply, without a model.
Never computes a token: a stub executor returns canned ones. The last line of output is one JSON document."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.machine import machine
from engine.config import EngineConfig, ResolvedConfig, SchedulerConfig, Targets
from engine.core.applier import Applier
from engine.core.core import EngineCore
from engine.lockstep.shape import StepShape
from engine.protocol import Event, Finished, SamplingParams, Submission
from engine.scheduling.planner import Plan
from engine.scheduling.request import create_request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts
from engine.step import Capabilities, RowKind, ScheduledRequest, StepOutput, StepPlan

BLOCK_SIZE = 16
VOCAB = 50_000
LIFE = 2048
"""Prompt and answer tokens of a request that outlasts the measurement."""
WARM_UP = 3
TRAFFIC = {
    "steady": "every seat decodes, so nobody is admitted",
    "churn": "one answer in 64 ends in each step, and a waiting request takes its place",
    "steady by time": "as steady, with targets in time",
    "churn by time": "as churn, and targets in time limit each step and order the prompts",
    "crowded": "memory is full, and admission_order bypass asks every waiting request whether it fits",
}
STORM = "memory runs out while all grow by a block at once, and sixteen are preempted in one step"
VICTIMS = 16
PROMPT_BLOCKS = 8
"""Prompt blocks of each request in a storm. Each victim frees these, and does not need its next block."""
COSTS = StepCosts((1, 512, 4096), (0.002, 0.004, 0.02), sample_s=1e-6, key_s=1e-9, attended_s=1e-9)
"""About what steps take here, where nothing is computed but plans."""
Milliseconds = dict[str, list[float]]


class CannedExecutor:
    """Returns the same token for every sampling row; computes nothing."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self._output: StepOutput | None = None
        self.returned_at = 0.0

    def launch(self, plan: StepPlan) -> None:
        sampled = tuple(() if row.kind is RowKind.MIDDLE else (1,) for row in plan.rows)
        self._output = StepOutput(plan.step_id, sampled)

    def collect(self) -> StepOutput:
        assert self._output is not None
        self.returned_at = time.perf_counter()
        return self._output

    def forget(self, request_ids: Sequence[str]) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _TimedScheduler(Scheduler):
    """A scheduler that records how long it takes to plan and to commit."""

    times: Milliseconds

    def plan(self, now: float) -> Plan:
        started = time.perf_counter()
        plan = super().plan(now)
        self.times["plan"].append((time.perf_counter() - started) * 1000)
        return plan

    def commit(self, plan: Plan, now: float) -> StepPlan:
        started = time.perf_counter()
        step = super().commit(plan, now)
        self.times["commit"].append((time.perf_counter() - started) * 1000)
        return step


class TimedCore(EngineCore):
    """An engine core that records the milliseconds of each phase. `apply` is everything after the executor's return."""

    def __init__(self, traffic: str, running: int, draw: random.Random) -> None:
        config = _storm_config(running) if traffic == "storm" else _config(traffic, running)
        self._canned = CannedExecutor()
        model = StepTimeModel(COSTS, deviation=0.1) if traffic.endswith("by time") else None
        super().__init__(self._canned, config, step_times=model)
        self.times: Milliseconds = defaultdict(list)
        self._scheduler = timed = _TimedScheduler(config, self._blocks, model)
        self._applier = Applier(timed, self._canned)
        timed.times = self.times
        self._draw = draw
        self._churns = traffic.startswith("churn")
        self._num_sent = 0

    @property
    def num_decoding(self) -> int:
        return len(self._scheduler.decoding)

    def send(self, count: int) -> None:
        for _ in range(count):
            prompt = tuple(self._draw.choices(range(VOCAB), k=self._draw.randint(100, 300)))
            answer = self._draw.randint(1, 127) if self._churns else LIFE - len(prompt)
            params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
            submission = Submission(str(self._num_sent), prompt, params)
            self.submit(create_request(submission, self.config, self._num_sent))
            self._num_sent += 1

    def send_equals(self, count: int, num_tenants: int) -> None:
        """Send requests whose prompts fill the same number of blocks and share none."""
        for number in range(self._num_sent, self._num_sent + count):
            prompt = (number % VOCAB, number // VOCAB, *range(2, PROMPT_BLOCKS * BLOCK_SIZE))
            params = SamplingParams(temperature=0.0, max_tokens=LIFE - len(prompt), ignore_eos=True)
            submission = Submission(str(number), prompt, params, tenant=f"t{number % num_tenants}")
            self.submit(create_request(submission, self.config, number))
        self._num_sent += count

    def replace_running(self, num_tenants: int) -> None:
        """End all running requests, send as many new ones, and admit the first in the queue in their place."""
        running = [*self._scheduler.prefilling, *self._scheduler.decoding]
        for request_id in running:
            self.abort(request_id)
        self.send_equals(len(running), num_tenants)
        super().step()

    def step(self, joint: StepShape | None = None) -> list[Event]:
        """Run a timed step, then send a new request for each that ended."""
        events = super().step(joint)
        self.times["apply"].append((time.perf_counter() - self._canned.returned_at) * 1000)
        self.send(sum(isinstance(event, Finished) for event in events))
        return events


def _config(traffic: str, running: int) -> ResolvedConfig:
    """Return a config with memory for all tokens of every running request, plus a block each for rounding. `crowded`
    has seats to spare, and no block beyond the running requests' tokens."""
    crowded, by_time = traffic == "crowded", traffic.endswith("by time")
    seats = running + (64 if crowded else 0)
    whole_life = SchedulerConfig(reserve_mode="full", preempt_policy="none", admission_order="bypass")
    asked = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=seats,
        max_num_batched_tokens=seats + 2048,
        max_prefill_tokens=2048,
        num_speculative_tokens=0,
        scheduler=whole_life if crowded else SchedulerConfig(),
        targets=Targets(tpot_ms=50.0, ttft_ms=2000.0) if by_time else Targets(),
    )
    return ResolvedConfig.of(
        asked,
        max_model_len=LIFE,
        num_kv_blocks=running * (LIFE // BLOCK_SIZE + (not crowded)),
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        dtype="none",
        device="none",
        kernels="canned",
        num_threads=1,
    )


def _storm_config(running: int) -> ResolvedConfig:
    """Return a config in which all seats are taken in one step, and the next step needs a block for each request. There
    are blocks for all but sixteen requests plus what these sixteen free when they are preempted."""
    return ResolvedConfig.of(
        EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=2 * running * LIFE,
            max_prefill_tokens=running * LIFE,
            max_queued_requests=10**6,
            num_speculative_tokens=0,
            scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, chunk_halving_context=0),
        ),
        max_model_len=LIFE,
        num_kv_blocks=running * (PROMPT_BLOCKS + 1) - VICTIMS * (PROMPT_BLOCKS + 1),
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        dtype="none",
        device="none",
        kernels="canned",
        num_threads=1,
    )


def measure_storms(running: int, waiting: int, num_tenants: int, storms: int) -> list[dict[str, Any]]:
    """Measure steps that preempt sixteen requests. Returns a cell for each phase, and one for all phases together."""
    core = TimedCore("storm", running, random.Random(0))
    core.send_equals(running + waiting, num_tenants)
    EngineCore.step(core)  # fills all seats
    kept: Milliseconds = defaultdict(list)
    for _ in range(storms + WARM_UP):
        core.times.clear()
        core.step()
        assert len(core.last_step.preempted) == VICTIMS, f"{len(core.last_step.preempted)} were preempted"
        for phase, times in core.times.items():
            kept[phase] += times
        core.replace_running(num_tenants)
    kept["step"] = [sum(times) for times in zip(*kept.values(), strict=True)]
    shape = {"traffic": "storm", "running": running, "waiting": waiting, "tenants": num_tenants}
    return [{**shape, "phase": phase, **spread(times[WARM_UP:])} for phase, times in kept.items()]


def settle(traffic: str, running: int, waiting: int, draw: random.Random) -> TimedCore:
    """Make a core with `running` decoding requests (in `churn`, nearly all decode) and `waiting` queued ones."""
    core = TimedCore(traffic, running, draw)
    core.send(running)
    while core.num_decoding < running - running // 10:
        core.step()
    core.send(waiting)
    for _ in range(2 * WARM_UP):
        core.step()
    core.times.clear()
    return core


def measure(traffic: str, running: int, waiting: int, steps: int, draw: random.Random) -> list[dict[str, Any]]:
    """Measure `steps` steps. Returns a cell for each phase."""
    core = settle(traffic, running, waiting, draw)
    for _ in range(steps):
        core.step()
    shape = {"traffic": traffic, "running": running, "waiting": waiting}
    return [{**shape, "phase": phase, **spread(times)} for phase, times in core.times.items()]


def measure_inputs(rows: int, tokens: int, steps: int) -> list[dict[str, Any]]:
    """Time `build_inputs`, including the slot mapping, for `rows` chunks with `tokens` in total. [] without torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    from engine.batch.inputs import build_inputs

    plan, threads = _chunks(rows, tokens // rows), torch.get_num_threads()
    torch.set_num_threads(1)  # these tensors are small: a second thread on a busy core costs ten times the work
    times = []
    for _ in range(steps + WARM_UP):
        started = time.perf_counter()
        build_inputs(plan, BLOCK_SIZE)
        times.append((time.perf_counter() - started) * 1000)
    torch.set_num_threads(threads)
    return [{"phase": "build_inputs", "rows": rows, "tokens": tokens, **spread(times[WARM_UP:])}]


def _chunks(rows: int, length: int) -> StepPlan:
    """Make a plan of middle chunks that start inside a block."""
    start, ids = 3 * BLOCK_SIZE + 5, tuple(range(length))
    blocks = -(-(start + length) // BLOCK_SIZE)
    tables = [tuple(range(i * blocks, (i + 1) * blocks)) for i in range(rows)]
    return StepPlan(0, tuple(ScheduledRequest("r", RowKind.MIDDLE, start, ids, table, None) for table in tables))


def spread(times: Sequence[float]) -> dict[str, float]:
    figures = {"ms_p50": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return {name: round(value, 4) for name, value in figures.items()}


def _print(cell: dict[str, Any]) -> None:
    inputs = (
        "{rows} rows, {tokens} tokens" if "rows" in cell else "{traffic:14} {running:5} running {waiting:6} waiting"
    )
    figures = "  {phase:12}  p50 {ms_p50:7.3f} ms  min {ms_min:7.3f}  max {ms_max:7.3f}"
    print(f"{inputs.format(**cell):44}{figures.format(**cell)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.scheduler",
        description="Measure how long it takes to plan a step, commit it and apply its results, for many requests. No "
        "model runs: tokens are canned. The last line is one JSON document.",
    )
    parser.add_argument(
        "--running", type=int, nargs="*", default=[64, 512], help="numbers of running requests to measure"
    )
    parser.add_argument(
        "--waiting", type=int, nargs="*", default=[100, 2000], help="numbers of waiting requests to measure"
    )
    parser.add_argument(
        "--traffic",
        nargs="*",
        default=list(TRAFFIC),
        choices=list(TRAFFIC),
        help="; ".join(f"{name}: {meaning}" for name, meaning in TRAFFIC.items()),
    )
    parser.add_argument("--storms", type=int, default=50, help=f"storms to measure; in a storm {STORM} (%(default)s)")
    parser.add_argument("--storm-running", type=int, default=512, help="running requests in a storm (%(default)s)")
    parser.add_argument("--storm-waiting", type=int, default=100_000, help="waiting requests in a storm (%(default)s)")
    parser.add_argument(
        "--storm-tenants",
        type=int,
        nargs="*",
        default=[1, 1000],
        help="numbers of tenants that the waiting requests belong to",
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of the slot mapping (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps measured for each combination (%(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    options = parser.parse_args(arguments)
    if options.storms and options.storm_running < VICTIMS * (PROMPT_BLOCKS + 2):
        parser.error(
            f"--storm-running must be at least {VICTIMS * (PROMPT_BLOCKS + 2)}, to preempt {VICTIMS} at a time"
        )
    cells: list[dict[str, Any]] = []
    for traffic, (running, waiting) in product(options.traffic, zip(options.running, options.waiting, strict=True)):
        cells += measure(traffic, running, waiting, options.steps, random.Random(options.seed))
    for tenants in options.storm_tenants if options.storms else ():
        cells += measure_storms(options.storm_running, options.storm_waiting, tenants, options.storms)
    for rows in (1, 16):
        cells += measure_inputs(rows, options.tokens, options.steps)
    for cell in cells:
        _print(cell)
    result = {"benchmark": "scheduler", **machine(), "python": platform.python_version(), "seed": options.seed}
    print(json.dumps({**result, "steps": options.steps, "traffic": {**TRAFFIC, "storm": STORM}, "cells": cells}))


if __name__ == "__main__":
    gc.freeze()  # as in an engine replica, which collects garbage rarely
    gc.set_threshold(50_000, 20, 50)
    main()
