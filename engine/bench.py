"""Owns the offline measurement of steps: how long one decode or prefill step takes, without a server.
Never schedules: it hands plans of a given shape to the executor. The last line it prints is one JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import DEFAULT_MODEL, EngineConfig
from engine.executor import create_executor
from engine.machine import machine
from engine.prepare import prepare_model
from engine.step import Executor, RowKind, RowSampling, ScheduledRequest, StepPlan

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def decode_plan(rows: int, context: int, block_size: int, draw: Callable[[], int]) -> StepPlan:
    """`rows` streams, each with `context` tokens in the cache."""
    blocks = -(-(context + 1) // block_size)
    return StepPlan(0, tuple(_row(i, RowKind.DECODE, context, 1, blocks, draw) for i in range(rows)))


def prefill_plan(count: int, context: int, block_size: int, draw: Callable[[], int]) -> StepPlan:
    """One chunk of `count` tokens after `context` tokens in the cache."""
    return StepPlan(0, (_row(0, RowKind.LAST, context, count, -(-(context + count) // block_size), draw),))


def _row(i: int, kind: RowKind, start: int, count: int, blocks: int, draw: Callable[[], int]) -> ScheduledRequest:
    ids = tuple(draw() for _ in range(count))
    table = tuple(range(i * blocks, (i + 1) * blocks))
    return ScheduledRequest(str(i), kind, start, ids, table, GREEDY)


def measure(executor: Executor, plan: StepPlan, steps: int) -> dict[str, float]:
    """Milliseconds of a step: median, least and most of `steps` after three that do not count."""
    times = []
    for _ in range(steps + 3):
        started = time.perf_counter()
        executor.launch(plan)
        executor.collect()
        times.append((time.perf_counter() - started) * 1000)
    counted = times[3:]
    return {"ms_p50": statistics.median(counted), "ms_min": min(counted), "ms_max": max(counted)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache of each row")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="decode rows of each cell")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="tokens of each prefill cell")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args(arguments)
    config = EngineConfig(dtype=options.dtype, load_format=options.load_format)
    model = prepare_model(options.model, progress=False, weights=options.load_format != "dummy")
    executor, resolved = create_executor(model, config)
    generator = random.Random(options.seed)

    def draw() -> int:
        return generator.randrange(resolved.vocab_size)

    plans = [("decode", n, decode_plan(n, options.context, resolved.block_size, draw)) for n in options.rows]
    plans += [("prefill", n, prefill_plan(n, options.context, resolved.block_size, draw)) for n in options.prefill]
    cells: list[dict[str, Any]] = []
    for kind, size, plan in plans:
        cells.append({"step": kind, "size": size, "context": options.context, **measure(executor, plan, options.steps)})
        print("{step:8} {size:5}  p50 {ms_p50:7.1f} ms  min {ms_min:7.1f}  max {ms_max:7.1f}".format(**cells[-1]))
    executor.shutdown()
    result = {"benchmark": "engine_step", **machine(), "model": options.model, "seed": options.seed}
    print(json.dumps({**result, "config": dataclasses.asdict(resolved), "cells": cells}))


if __name__ == "__main__":
    main()
