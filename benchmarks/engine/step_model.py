"""Owns the study of the step time model on the CPU: how far predictions are from what random steps really take.
Never schedules: it draws steps and hands them to an executor. The last line of output is one JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.results import write_whole
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.calibration import GREEDY, calibrate, run_timed
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts, work_of
from engine.step import Executor, RowKind, ScheduledRequest, StepPlan

KINDS = ("decode", "prefill", "mixed")
BETWEEN = "between"
PARTS = ("first", BETWEEN, "last")
MAX_ROWS, MAX_CHUNK, MAX_CONTEXT = 32, 480, 3000

Error = dict[str, float]
"""By model: predicted ÷ measured seconds - 1."""


def draw_step(kind: str, draw: random.Random, config: ResolvedConfig) -> StepPlan:
    """Draw a step: log-uniform numbers of rows and tokens, each row with a context of its own."""
    num_decodes = 0 if kind == "prefill" else _log_uniform(draw, 1, MAX_ROWS)
    chunks = 0 if kind == "decode" else draw.choice((1, 1, 1, 2, 3))
    rows: list[ScheduledRequest] = []
    left, first = MAX_CHUNK, 0
    for number in range(num_decodes + chunks):
        decodes = number < num_decodes
        count = 1 if decodes else _log_uniform(draw, 1, max(left // 2, 1) if chunks > 1 else left)
        left -= 0 if decodes else count
        longest = min(MAX_CONTEXT, config.max_model_len - count)
        start = 0 if not decodes and draw.random() < 0.5 else _log_uniform(draw, 1, longest)
        needed = -(-(start + count) // config.block_size)
        if first + needed > config.num_kv_blocks:
            break
        last = decodes or draw.random() < 0.5
        kind_of_row = RowKind.DECODE if decodes else RowKind.LAST if last else RowKind.MIDDLE
        ids = tuple(draw.randrange(config.vocab_size) for _ in range(count))
        table = tuple(range(first, first + needed))
        rows.append(ScheduledRequest(str(number), kind_of_row, start, ids, table, GREEDY if last else None))
        first += needed
    return StepPlan(0, tuple(rows))


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(math.exp(draw.uniform(math.log(least), math.log(max(most, least)))))


def drawn_steps(draw: random.Random, config: ResolvedConfig) -> Iterator[tuple[str, StepPlan]]:
    while True:
        kind = draw.choice(KINDS)
        if (plan := draw_step(kind, draw, config)).rows:
            yield kind, plan


def study(
    executor: Executor, config: ResolvedConfig, draw: random.Random, *, steps: int, seconds: float, busy: float = 1.0
) -> dict[str, Any]:
    """Calibrate, then predict and run drawn steps: `steps` of them at once, others until `seconds` have passed, and
    `steps` more. Between, the engine computes for a share `busy` of the time, and rests otherwise."""
    began = time.perf_counter()
    found = calibrate(executor, config)
    took = time.perf_counter() - began
    model = StepTimeModel(found.costs, deviation=found.deviation)
    began, num_steps = time.perf_counter(), 0
    cells: list[dict[str, Any]] = []
    for name in PARTS:
        errors: list[tuple[str, Error]] = []
        for kind, plan in drawn_steps(draw, config):
            passed = time.perf_counter() - began
            if passed >= seconds if name == BETWEEN else len(errors) == steps:
                break
            measured, error = _predicted(executor, plan, found.costs, model)
            errors.append((kind, error))
            if name == BETWEEN:
                time.sleep(measured * (1 / busy - 1))
        num_steps += len(errors)
        cells += _cells(name, errors)
    return {
        "calibration_s": took,
        "shapes": len(found.steps),
        "deviation": found.deviation,
        "costs": found.costs.document(),
        "num_steps": num_steps,
        "seconds": time.perf_counter() - began,
        "busy": busy,
        "scale": model.now.scale,
        "extra_ms": model.now.extra_s * 1000,
        "cells": cells,
    }


def _predicted(executor: Executor, plan: StepPlan, fitted: StepCosts, model: StepTimeModel) -> tuple[float, Error]:
    """Run a step, and let the model learn from it. Returns its seconds, and how far both predictions were from them."""
    work = work_of(plan)
    predicted = {"fitted": fitted.seconds(work), "corrected": model.now.seconds(work)}
    measured = run_timed(executor, plan)
    model.observe(work, measured)
    return measured, {name: seconds / measured - 1 for name, seconds in predicted.items()}


def _cells(part: str, errors: Sequence[tuple[str, Error]]) -> Iterator[dict[str, Any]]:
    for kind in (*KINDS, "all"):
        own = [error for of_kind, error in errors if kind in (of_kind, "all")]
        if len(own) > 1:
            for which in ("fitted", "corrected"):
                spread = _spread([abs(error[which]) for error in own])
                yield {"steps": part, "kind": kind, "model": which, **spread}


def _spread(errors: Sequence[float]) -> dict[str, float]:
    percentiles = statistics.quantiles(errors, n=100, method="inclusive")
    return {"count": len(errors), "p50": percentiles[49], "p90": percentiles[89], "p99": percentiles[98]}


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/step-model.md: errors in percent of what the steps took."""
    lines = ["| steps | kind | model | number | p50 | p90 | p99 |", "|---|---|---|--:|--:|--:|--:|"]
    for cell in document["cells"]:
        errors = " | ".join(f"{cell[name]:.1%}" for name in ("p50", "p90", "p99"))
        lines.append(f"| {cell['steps']} | {cell['kind']} | {cell['model']} | {cell['count']} | {errors} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    config = EngineConfig(
        device="cpu",
        load_format=options.load_format,
        quantize="none",
        num_kv_blocks=options.blocks,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=512,
        max_prefill_tokens=512,
        speculative=SpeculativeConfig(method="none"),
    )
    model = prepare_model(options.model, progress=False, weights=options.load_format != "dummy")
    executor, resolved = create_executor(model, config)
    try:
        found = study(
            executor,
            resolved,
            random.Random(options.seed),
            steps=options.steps,
            seconds=options.seconds,
            busy=options.busy,
        )
    finally:
        executor.shutdown()
    document = {
        "benchmark": "step_model",
        **machine(),
        "model": options.model,
        "seed": options.seed,
        "config": dataclasses.asdict(resolved),
        **found,
    }
    if options.out:
        write_whole(options.out, document)
    print(table(document))
    print(json.dumps(document))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.step_model",
        description="Calibrate the step time model on this CPU, and compare its predictions with random steps.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (%(default)s)")
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=["auto", "dummy"],
        help="dummy: random weights in the model's shape (%(default)s)",
    )
    parser.add_argument("--blocks", type=int, default=4000, help="KV blocks of 16 tokens (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=400, help="steps compared at the beginning and at the end (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="when the steps at the end begin at the earliest (%(default)s)"
    )
    parser.add_argument(
        "--busy", type=float, default=1.0, help="share of the time to compute between the two (%(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the steps; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
