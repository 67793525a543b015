"""Owns the comparison of steps limited by time with steps of fixed sizes: gaps of streams, and first tokens of long
prompts beside them, on the CPU.
Never uses a server. Settings take turns, round by round; the last line of output is one JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine.mixed import MixedLoad, Traffic, medians, with_budget
from benchmarks.machine import machine
from benchmarks.results import write_whole
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig, Targets
from engine.core.calibration import calibrate
from engine.scheduling.step_prediction import StepTimeModel

BY_TIME = "time"
FIGURES = ("gap_p50", "gap_p99", "gap_max", "ttft_p50", "ttft_max")


def settings(resolved: ResolvedConfig, budgets: Sequence[int], tpot_ms: float) -> dict[str, ResolvedConfig]:
    """Return what is compared, by name: fixed budgets, and the largest of them limited by time."""
    found = {str(budget): with_budget(resolved, budget) for budget in budgets}
    scheduler = dataclasses.replace(resolved.scheduler, chunk_halving_context=0)
    largest = dataclasses.replace(found[str(max(budgets))], scheduler=scheduler, targets=Targets(tpot_ms=tpot_ms))
    return {**found, BY_TIME: largest}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    asked = EngineConfig(  # no drafts, so that each gap is one token
        device="cpu",
        quantize="none",
        max_num_seqs=32,
        kv_cache_memory_gib=2.0,
        speculative=SpeculativeConfig(method="none"),
    )
    executor, resolved = create_executor(prepare_model(DEFAULT_MODEL, progress=False), asked)
    compared = settings(resolved, options.budgets, options.tpot_ms)
    began = time.perf_counter()
    found = calibrate(executor, compared[BY_TIME])
    calibration_s = time.perf_counter() - began
    results: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for streams in options.streams:
            for tokens in options.prompts:
                traffic = Traffic(
                    streams=streams, stream_prompt=48, stream_answer=4000, head_start=40, prompts=2,
                    prompt_tokens=tokens, every_s=options.every_s * tokens / 1500,
                )  # fmt: skip
                for name, config in compared.items():
                    if name != BY_TIME and int(name) <= streams:
                        continue  # decodes take the whole step, and the prompt would wait for their ends
                    model = StepTimeModel(found.costs, deviation=found.deviation) if name == BY_TIME else None
                    one = MixedLoad(executor, config, options.seed + number, traffic, step_times=model).run()
                    results.setdefault((streams, tokens, name), []).append(one)
                    print(streams, tokens, name, {figure: round(one[figure], 1) for figure in FIGURES}, flush=True)
    executor.shutdown()
    cells = [
        {"streams": streams, "prompt_tokens": tokens, "steps": name, **medians(rounds)}
        for (streams, tokens, name), rounds in results.items()
    ]
    return {
        "benchmark": "targets",
        **machine(),
        "seed": options.seed,
        "rounds": options.rounds,
        "tpot_ms": options.tpot_ms,
        "every_s": options.every_s,
        "calibration_s": calibration_s,
        "deviation": found.deviation,
        "cells": cells,
    }


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/targets.md: milliseconds, medians over rounds with the extremes in
    brackets."""
    lines = ["| streams | prompt | a step's prefill | gap p50 | gap p99 | first token |", "|--:|--:|---|--:|--:|--:|"]
    for cell in document["cells"]:
        name = f"by time, {document['tpot_ms']:g} ms" if cell["steps"] == BY_TIME else f"{cell['steps']} tokens"
        figures = " | ".join(_shown(cell[figure]) for figure in ("gap_p50", "gap_p99", "ttft_p50"))
        lines.append(f"| {cell['streams']} | {cell['prompt_tokens']:,} | {name} | {figures} |")
    return "\n".join(lines)


def equal_gaps(document: dict[str, Any]) -> str:
    """Render the second table: the first token by time, and what a fixed number of tokens would give at the same 99th
    percentile of gaps. That is interpolated between the two budgets around it, linearly in the logarithms."""
    lines = ["| streams | prompt | gap p99 | by time | a fixed budget | share |", "|--:|--:|--:|--:|--:|--:|"]
    for cell in document["cells"]:
        if cell["steps"] != BY_TIME:
            continue
        load = (cell["streams"], cell["prompt_tokens"])
        budgets = [c for c in document["cells"] if (c["streams"], c["prompt_tokens"]) == load and c is not cell]
        gap, ttft = cell["gap_p99"][0], cell["ttft_p50"][0]
        fixed = _between(sorted((c["gap_p99"][0], c["ttft_p50"][0]) for c in budgets), gap)
        compared = f"{fixed:,.0f} | {ttft / fixed:.2f}" if fixed else "– | –"
        lines.append(f"| {load[0]} | {load[1]:,} | {gap:,.0f} | {ttft:,.0f} | {compared} |")
    return "\n".join(lines)


def _between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return y at x on the line through the points around it; None where there is no point on one side."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1 and x0 < x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
    return None


def _shown(spread: Sequence[float]) -> str:
    median, least, most = spread
    return f"{median:,.0f} ({least:,.0f}–{most:,.0f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.targets",
        description="Compare steps that are limited by time with steps of fixed sizes, beside long prompts.",
    )
    parser.add_argument("--tpot-ms", type=float, default=75.0, help="the target between two tokens (%(default)s)")
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[16, 32, 64, 128],
        help="fixed tokens of a step, where there are fewer streams (%(default)s)",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 16], help="numbers of streams (%(default)s)")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[1500, 3000], help="tokens of the long prompts (%(default)s)"
    )
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between prompts of 1,500 (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the prompts' seed (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args(arguments)
    document = measure(options)
    if options.out:
        write_whole(options.out, document)
    print(table(document), equal_gaps(document), sep="\n\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
