"""Owns the profile of single steps: the device's time for each, and the kernels that it consists of.
Never judges a time."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.engine.gpu import bytes_read, device_times, flops
from benchmarks.engine.step import decode_plan, prefill_plan, step_of
from engine.config import EngineConfig
from engine.execution.device import choose_device
from engine.execution.executor import ModelExecutor
from engine.models.config import ModelConfig
from engine.step import StepPlan
from tests.gpu.hour.engines import started
from tests.gpu.hour.phases import LARGE, STAND_IN

DECODE = [(rows, context) for context in (1024, 8192) for rows in (1, 16, 64, 256)]
PREFILL = 8192
STEPS = 3
MOST_KERNELS = 30
BALLAST = 512 << 20


def profile(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Profile the 8B shape: decodes of several sizes, and one prefill. What does not fit the KV cache is named and
    skipped."""
    rehearsal = options.device == STAND_IN
    found: list[dict[str, Any]] = []
    with (
        started(options.device, LARGE, max_num_seqs=256, max_num_batched_tokens=PREFILL) as (executor, resolved),
        torch.inference_mode(),
    ):
        model: ModelConfig = executor.model.decoder.config  # type: ignore[attr-defined]
        draw = random.Random(5)
        for name, plan, least in _steps(resolved.block_size, lambda: draw.randrange(1, 200), model, rehearsal):
            used = 1 + max(block for row in plan.rows for block in row.block_ids)
            if used > resolved.num_kv_blocks:
                found.append({"step": name, "missing": f"{used} KV blocks, and there are {resolved.num_kv_blocks}"})
            else:
                found.append({"step": name, **least, **_profiled(executor, plan, rehearsal)})
            keep({"num_kv_blocks": resolved.num_kv_blocks, "steps": found})
            print({key: value for key, value in found[-1].items() if key != "kernels"}, flush=True)


def _steps(
    block_size: int, draw: Callable[[], int], model: ModelConfig, rehearsal: bool
) -> Iterator[tuple[str, StepPlan, dict[str, int]]]:
    for rows, context in [(1, 16), (3, 40)] if rehearsal else DECODE:
        least = {"least_bytes": bytes_read(model, rows, context, 2)}
        yield f"decode {rows} x {context}", decode_plan(rows, context, block_size, draw), least
    tokens = 24 if rehearsal else PREFILL
    yield f"prefill {tokens}", prefill_plan(tokens, 0, block_size, draw), {"least_flops": flops(model, tokens, 0)}


def _profiled(executor: ModelExecutor, plan: StepPlan, rehearsal: bool) -> dict[str, Any]:
    device, _ = choose_device(EngineConfig(device="cuda"))
    ballast = torch.zeros(1 if rehearsal else BALLAST // 4, device=device.torch_device)
    run = step_of(executor, plan)
    graph = run().graph
    times = device_times(device, executor, plan, lambda: ballast.add_(1), STEPS)
    activities = [ProfilerActivity.CPU] if rehearsal else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(STEPS):
            run()
        device.release_unused()  # waits for it
    kernels = kernels_of(profiled.key_averages(), rehearsal)
    return {
        "graph": None if graph is None else {"name": graph.name, "hit": graph.hit},
        "device_ms": statistics.median(times) if times else None,
        "kernels_us": sum(kernel["us"] for kernel in kernels),
        "launches": sum(kernel["calls"] for kernel in kernels),
        "kernels": kernels[:MOST_KERNELS],
    }


def kernels_of(events: Iterable[Any], rehearsal: bool) -> list[dict[str, Any]]:
    """Return the device's kernels of a profile, by their time in one step; of a rehearsal, which has none, operators.

    Each event has a new object for its type: types are equal, and never the same object.
    """
    found = [
        {"name": event.key[:120], "us": own / STEPS, "calls": event.count / STEPS}
        for event in events
        if rehearsal or event.device_type == DeviceType.CUDA  # operators count their kernels' time again
        if (own := _own_us(event, rehearsal)) > 0
    ]
    return sorted(found, key=lambda kernel: -kernel["us"])


def _own_us(event: Any, rehearsal: bool) -> float:
    return float(event.self_cpu_time_total if rehearsal else event.self_device_time_total)
