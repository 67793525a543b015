"""Owns the offline measurement of steps on the CPU: how long one takes with which kernels, and what bounds it.
Never schedules, except to measure Python's share: it hands plans of given shapes to executors. The last line of output
is one JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.adapters import in_turn, keep_random
from benchmarks.machine import machine
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.calibration import GREEDY
from engine.core.core import EngineCore
from engine.execution.executor import ModelExecutor
from engine.models.native import NativeModel
from engine.protocol import SamplingParams, Submission
from engine.scheduling.request import create_request
from engine.step import Executor, RowKind, ScheduledRequest, StateUse, StepOutput, StepPlan
from kernels.cpu.native.program import Packed, Program, StepRows


def decode_plan(rows: int, context: int, block_size: int, draw: Callable[[], int]) -> StepPlan:
    """Make a step that decodes `rows` streams, each with `context` tokens in the cache."""
    blocks = -(-(context + 1) // block_size)
    return StepPlan(0, tuple(_row(i, RowKind.DECODE, context, 1, blocks, draw) for i in range(rows)))


def prefill_plan(count: int, context: int, block_size: int, draw: Callable[[], int]) -> StepPlan:
    """Make a step with one chunk of `count` tokens after `context` tokens in the cache."""
    return StepPlan(0, (_row(0, RowKind.LAST, context, count, -(-(context + count) // block_size), draw),))


def _row(i: int, kind: RowKind, start: int, count: int, blocks: int, draw: Callable[[], int]) -> ScheduledRequest:
    ids = tuple(draw() for _ in range(count))
    table = tuple(range(i * blocks, (i + 1) * blocks))
    return ScheduledRequest(str(i), kind, start, ids, table, GREEDY)


def measure(run: Callable[[], object], steps: int) -> list[float]:
    """Return the milliseconds of each of `steps` runs, after three that do not count."""
    times = []
    for _ in range(steps + 3):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1000)
    return times[3:]


def in_slots(executor: Executor, plan: StepPlan) -> StepPlan:
    """Give each row a slot for its state if the model has recurrent state."""
    if not executor.capabilities.recurrent_state:
        return plan
    return replace(plan, rows=tuple(row._replace(state=StateUse(i)) for i, row in enumerate(plan.rows)))


def step_of(executor: Executor, plan: StepPlan) -> Callable[[], StepOutput]:
    plan = in_slots(executor, plan)

    def run() -> StepOutput:
        executor.launch(plan)
        return executor.collect()

    return run


class Products:
    """Only the matrix products of a step. They bound it until attention reads as much memory as the weights."""

    def __init__(self, model: NativeModel, num_tokens: int) -> None:
        weights = model.decoder.weights
        self._program = Program(model.team, block_size=16, capacity=num_tokens, dtype=model.decoder.dtype)
        x = self._program.embed(weights.embedding)
        for described, layer in zip(model.decoder.config.layers, weights.layers, strict=True):
            x = self._program.linear(self._program.linear(x, layer.qkv), layer.output)
            if described.experts is None:
                x = self._program.linear(self._program.gated_linear(x, layer.gate_up), layer.down)
            else:
                assert layer.router is not None
                routing = described.experts.routing
                x = self._program.experts(x, layer.router, layer.gate_up, layer.down, routing)
        self._program.logits(x, weights.lm_head, num_tokens)

    def step_of(self, plan: StepPlan) -> Callable[[], object]:
        """Return a run with as many tokens and sampled rows as `plan` has."""
        counts = [len(row.token_ids) for row in plan.rows]
        sampled = [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
        ids = [row.token_ids for row in plan.rows]
        rows = StepRows(ids, [0] * len(counts), counts, [[0] * count for count in counts], sampled)
        return lambda: self._program.run(rows)


def matrix_bytes(model: NativeModel) -> int | None:
    """Return the bytes of all matrices of a model, which a step of one token reads; None for a mixture of experts, of
    which it reads some. The embedding counts if it is the LM head as well."""
    weights = model.decoder.weights
    if any(layer.router is not None for layer in weights.layers):
        return None
    dense = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(_bytes_of(matrix.weight) for matrix in (*dense, weights.lm_head))


def _bytes_of(packed: Packed) -> int:
    parts = [packed.panels, packed.scales, *(() if packed.groups is None else packed.groups.data)]
    return sum(part.nbytes for part in parts if part is not None)


class Reading:
    """Reads memory and does nothing else: what a step of one token cannot be faster than."""

    def __init__(self, num_threads: int, mib: int = 512) -> None:
        self._parts = np.array_split(np.ones(mib << 17, np.int64), num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self.num_bytes = mib << 20

    def step(self) -> None:
        list(self._pool.map(np.bitwise_or.reduce, self._parts))


ANSWER_BESIDES = 40
"""Additional tokens of each stream's answer, so that no stream ends while others are still in prefill."""


def python_share(
    executor: ModelExecutor, config: ResolvedConfig, rows: int, context: int, steps: int, draw: Callable[[], int]
) -> dict[str, Any]:
    """Measure the percentage of time in which no compiled program ran, over `steps` steps of the whole engine loop with
    `rows` decoding streams."""
    core = EngineCore(executor, config)
    params = SamplingParams(temperature=0.0, max_tokens=steps + ANSWER_BESIDES, ignore_eos=True)
    for i in range(rows):
        prompt = tuple(draw() for _ in range(context))
        core.submit(create_request(Submission(f"stream {i}", prompt, params), config, i))
    while core.load().num_queued_tokens or core.load().num_running < rows:
        core.step()
    model = executor.model
    assert isinstance(model, NativeModel)
    begun, ran = time.perf_counter(), model.busy_s
    for _ in range(steps):
        core.step()
    whole, ran = time.perf_counter() - begun, model.busy_s - ran
    for i in range(rows):
        core.abort(f"stream {i}")
    return {"step": "loop", "size": rows, "step_ms": 1000 * whole / steps, "python_percent": 100 * (1 - ran / whole)}


BITS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int8+rounded": {"quantize": "int8", "activations": "int8"},
    "stored": {"quantize": "stored"},
    "stored+rounded": {"quantize": "stored", "activations": "int8"},
}
"""Settings of the native kernels that are compared as if they were kernels of their own."""


ADAPTED = "+lora"
"""Behind the kind of a step whose rows have adapters."""


def _settings(name: str) -> dict[str, Any]:
    return {"kernels": "native", **BITS[name]} if name in BITS else {"kernels": name, "quantize": "none"}


def _summary(times: Sequence[float]) -> dict[str, float]:
    return {"ms_p50": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


def _cell(cell: dict[str, Any]) -> str:
    return "{ms_p50:.1f} ({ms_min:.1f}–{ms_max:.1f})".format(**cell)


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/step-time.md: medians in milliseconds, with minimum and maximum in brackets,
    and the share of the matrix products in a step of the native kernels."""
    shapes: dict[tuple[str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for cell in document["cells"]:
        shapes[cell["step"], cell["size"]][cell["kernels"]] = cell
    names = list(dict.fromkeys(cell["kernels"] for cell in document["cells"]))
    lines = [f"| step | {' | '.join(names)} | products / native |", "|---" * (len(names) + 2) + "|"]
    for (kind, size), cells in shapes.items():
        what = f"{size} streams decode" if kind.startswith("decode") else f"{size} tokens of a prompt"
        what += ", with adapters" * kind.endswith(ADAPTED)
        found = [_cell(cells[name]) if name in cells else "" for name in names]
        share = f"{cells['products']['ms_p50'] / cells['native']['ms_p50']:.0%}" if "products" in cells else ""
        lines.append(f"| {what} | {' | '.join(found)} | {share} |")
    return "\n".join(lines)


def reading_table(document: dict[str, Any]) -> str:
    """Render a table of how fast steps of one stream read their weights, beside reading alone."""
    reading = document["reading"]
    steps = {cell["kernels"]: cell for cell in document["cells"] if (cell["step"], cell["size"]) == ("decode", 1)}
    peak = reading["bytes"] / reading["ms_p50"] / 1e6
    lines = ["| weights | MB | step, ms | GB/s | of reading alone |", "|---|--:|--:|--:|--:|"]
    for name, count in document["matrix_bytes"].items():
        rate = count / steps[name]["ms_p50"] / 1e6
        lines.append(f"| {name} | {count / 1e6:.0f} | {_cell(steps[name])} | {rate:.1f} | {rate / peak:.0%} |")
    least, most = (reading["bytes"] / reading[name] / 1e6 for name in ("ms_max", "ms_min"))
    return "\n".join([*lines, f"| reading alone | | | {peak:.1f} ({least:.1f}–{most:.1f}) | 100% |"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    model = prepare_model(options.model, progress=False, weights=options.load_format != "dummy")
    largest = max([1, *options.rows]) * (options.context + 1) + max([0, *options.prefill]) + options.context
    streams = options.loop * (options.context + options.steps + ANSWER_BESIDES + 16)  # 16: a partly filled block
    config = EngineConfig(
        device="cpu",  # this compares CPU kernels; benchmarks.engine.gpu measures a GPU's steps
        dtype=options.dtype,
        load_format=options.load_format,
        num_kv_blocks=max(largest, streams) // 16 + 64,
        max_num_seqs=max(EngineConfig().max_num_seqs, options.loop),
        speculative=SpeculativeConfig(method="none"),
        max_loras=options.loras,
        max_lora_rank=options.lora_rank,
    )
    made = {}
    for name in options.kernels:
        own = dataclasses.replace(config, **_settings(name))
        named = prepare_model(options.model, progress=False, stored=True) if own.stored else model
        made[name] = create_executor(named, own)
    resolved = next(iter(made.values()))[1]
    generator = random.Random(options.seed)

    def draw() -> int:
        return generator.randrange(resolved.vocab_size)

    plans = [("decode", n, decode_plan(n, options.context, resolved.block_size, draw)) for n in options.rows]
    plans += [("prefill", n, prefill_plan(n, options.context, resolved.block_size, draw)) for n in options.prefill]
    if options.loras:
        kept = keep_random((executor for executor, _ in made.values()), model, options.loras, options.lora_rank, 0)
        plans += [(kind + ADAPTED, size, in_turn(plan, kept)) for kind, size, plan in plans]
    times: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    loops = []
    reading, read_ms = Reading(resolved.num_threads), list[float]()
    native = made["native"][0].model if "native" in made else None
    products = Products(native, max([*options.rows, *options.prefill])) if isinstance(native, NativeModel) else None
    with torch.inference_mode():
        for _ in range(options.rounds):
            read_ms += measure(reading.step, options.steps)
            for kind, size, plan in plans:
                for name, (executor, _) in made.items():
                    times[kind, size, name] += measure(step_of(executor, plan), options.steps)
                if products is not None and not kind.endswith(ADAPTED):
                    times[kind, size, "products"] += measure(products.step_of(plan), options.steps)
            if products is not None:
                loops.append(python_share(*made["native"], options.loop, options.context, options.steps, draw))
    cells = [
        {"step": kind, "size": size, "context": options.context, "kernels": name, **_summary(found)}
        for (kind, size, name), found in times.items()
    ]
    for cell in cells:
        print("{step:12} {size:5}  {kernels:10} {ms_p50:7.1f} ms ({ms_min:.1f}–{ms_max:.1f})".format(**cell))
    for loop in loops:
        print("{step:12} {size:5}  step {step_ms:7.1f} ms  Python {python_percent:5.1f} %".format(**loop))
    models = {name: executor.model for name, (executor, _) in made.items()}
    found_bytes = {name: matrix_bytes(model) for name, model in models.items() if isinstance(model, NativeModel)}
    for executor, _ in made.values():
        executor.shutdown()
    result = {
        "benchmark": "engine_step",
        **machine(),
        "model": options.model,
        "seed": options.seed,
        "config": dataclasses.asdict(resolved),
        "cells": cells,
        "loops": loops,
        "reading": {"bytes": reading.num_bytes, **_summary(read_ms)},
        "weights": {name: own.reasons.get("weights", own.dtype) for name, (_, own) in made.items()},
        "matrix_bytes": {name: count for name, count in found_bytes.items() if count and 1 in options.rows},
    }
    document = json.dumps(result)
    if options.out:
        options.out.write_text(document + "\n")
    print(document)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits if an option is unknown or wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.step",
        description="Measure how long a step takes on the CPU, with each kind of kernels, and what bounds it. It hands "
        "steps of given shapes to the executor; only Python's share is measured with the scheduler. The last line is "
        "one JSON document.",
        epilog="benchmarks.engine.gpu measures whole loads, and GPUs.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (%(default)s)")
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=["auto", "dummy"],
        help="dummy: random weights in the model's shape (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float32"],
        help="type of weights and activations (%(default)s)",
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["native", "torch_cpu"],
        help="kernels to compare; int8 is native with weights rounded to 8 bits, stored with a GGUF file's own, and "
        "+rounded behind either adds activations in int8",
    )
    parser.add_argument("--context", type=int, default=200, help="cached tokens of each row (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32], help="numbers of decode rows to measure")
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[64, 256], help="numbers of prefill tokens to measure"
    )
    parser.add_argument(
        "--loras", type=int, default=0, help="measure each step with this many adapters in turn, too (%(default)s)"
    )
    parser.add_argument("--lora-rank", type=int, default=16, help="the rank of these adapters (%(default)s)")
    parser.add_argument(
        "--loop", type=int, default=16, help="streams in the measurement of the engine's whole loop (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps measured for each combination in a round (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all combinations (%(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
