"""Owns the mixed-load measurement: how long running streams stand still while long prompts are prefilled beside them.
Never uses a server or threads: one loop submits due requests, steps the engine, and timestamps every token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.protocol import Failed, Finished, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.scheduling.step_prediction import StepTimeModel
from engine.step import Executor, RowKind, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Streams that decode, and long prompts that arrive beside them."""

    streams: int = 4
    stream_prompt: int
    stream_answer: int
    """Maximum tokens of a stream. All streams end with the load; one that ends earlier makes the run invalid."""
    head_start: int
    """Tokens that every stream gets before anything else arrives."""
    warm_up: int = 0
    """Number of prompts that do not count, one after another."""
    alone_s: float = 0.0
    """Time for which the streams then decode alone, for comparison. If this and the warm-up are 0, the head start
    serves as the comparison."""
    prompts: int = 5
    prompt_tokens: int
    every_s: float


ON_CPU = Traffic(stream_prompt=48, stream_answer=1500, head_start=40, prompt_tokens=1500, every_s=5.0)
# S1's own cell, except for longer answers: a fast GPU would finish 1,024 tokens before the last prompt arrived.
CANONICAL = Traffic(
    stream_prompt=512, stream_answer=8192, head_start=8, warm_up=5, alone_s=10.0, prompt_tokens=4096, every_s=2.0
)
WHOLE = 1 << 20
"""A budget that no prompt reaches, which switches chunking off."""


class _Watched:
    """Counts the steps with prefill beside all streams. Without any, nothing was measured."""

    def __init__(self, executor: Executor, num_streams: int) -> None:
        self._num_streams = num_streams
        self.collect, self.forget, self.shutdown = executor.collect, executor.forget, executor.shutdown
        self.capabilities = executor.capabilities
        self._launch = executor.launch
        self.num_mixed_steps = 0

    def launch(self, plan: StepPlan) -> None:
        num_decode = sum(row.kind is RowKind.DECODE for row in plan.rows)
        self.num_mixed_steps += num_decode == self._num_streams and len(plan.rows) > num_decode
        self._launch(plan)


class MixedLoad:
    """Lets streams decode and, after a head start, sends long prompts on schedule, whatever the engine does."""

    def __init__(
        self,
        executor: Executor,
        config: ResolvedConfig,
        seed: int,
        traffic: Traffic = ON_CPU,
        *,
        step_times: StepTimeModel | None = None,
    ) -> None:
        self._traffic = traffic
        self._streams = [f"stream {i}" for i in range(traffic.streams)]
        self._prompts = [f"prompt {i}" for i in range(traffic.prompts)]
        self._watched = _Watched(executor, traffic.streams)
        self._core = EngineCore(self._watched, config, step_times=step_times)
        self._draw = random.Random(seed)
        self._vocab = config.vocab_size
        self._arrivals = 0
        self._stamps: dict[str, list[float]] = defaultdict(list)
        self._submitted: dict[str, float] = {}
        self._finished: set[str] = set()

    def run(self) -> dict[str, Any]:
        traffic = self._traffic
        for name in self._streams:
            self._submit(name, traffic.stream_prompt, traffic.stream_answer)
        while min(len(self._stamps[name]) for name in self._streams) < traffic.head_start:
            self._step()
        for i in range(traffic.warm_up):
            self._submit(f"warm-up {i}", traffic.prompt_tokens, 1)
            while not self._stamps[f"warm-up {i}"]:
                self._step()
        alone_from = time.perf_counter() if traffic.warm_up or traffic.alone_s else 0.0
        while time.perf_counter() < alone_from + traffic.alone_s:
            self._step()
        start = time.perf_counter()
        self._watched.num_mixed_steps = submitted = 0
        while submitted < traffic.prompts or any(not self._stamps[name] for name in self._prompts):
            if submitted < traffic.prompts and time.perf_counter() >= start + submitted * traffic.every_s:
                self._submit(self._prompts[submitted], traffic.prompt_tokens, 1)
                submitted += 1
            self._step()
        end = time.perf_counter()
        for request_id in list(self._submitted):
            self._core.abort(request_id)
        return self._figures(alone_from, start, end)

    def _submit(self, request_id: str, prompt: int, answer: int) -> None:
        ids = tuple(self._draw.randrange(self._vocab) for _ in range(prompt))
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._core.submit(create_request(Submission(request_id, ids, params), self._core.config, self._arrivals))
        self._submitted[request_id] = time.perf_counter()
        self._arrivals += 1

    def _step(self) -> None:
        events = self._core.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Failed):  # otherwise its gaps would be missing, and the figures would look too good
                raise RuntimeError(f"{event.request_id} failed: {event.message}")
            if isinstance(event, Token):
                self._stamps[event.request_id].append(now)
            if isinstance(event, Finished):
                self._finished.add(event.request_id)

    def _figures(self, alone_from: float, start: float, end: float) -> dict[str, Any]:
        """Return figures in milliseconds. `gap` is between tokens of the streams while prompts arrive, `alone` before
        that. Of the former, `stall` are the gaps during which a prompt was present, and `steady` the others."""
        spans = [
            span
            for name in self._streams
            for span in pairwise(self._stamps[name])
            if span[1] >= alone_from and span[0] < end
        ]
        there = [(self._submitted[name], self._stamps[name][0]) for name in self._prompts]
        during = [(earlier, later) for earlier, later in spans if start <= later <= end]

        def is_stall(span: tuple[float, float]) -> bool:
            return any(span[0] < token and span[1] > submitted for submitted, token in there)

        first = [(token - submitted) * 1000 for submitted, token in there]
        return {
            **_spread("alone", [span for span in spans if span[1] < start]),
            **_spread("gap", during),
            **_spread("stall", [span for span in during if is_stall(span)]),
            **_spread("steady", [span for span in during if not is_stall(span)]),
            "ttft_p50": statistics.median(first),
            "ttft_max": max(first),
            "num_overruns": sum(ms > 1000 * self._traffic.every_s for ms in first),
            "num_ended_early": len(self._finished.intersection(self._streams)),
            "valid": self._watched.num_mixed_steps > 0 and self._finished.isdisjoint(self._streams),
        }


def _spread(name: str, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return percentiles of the spans' lengths in milliseconds; nothing if there are no spans."""
    if not spans:
        return {}
    gaps = [(later - earlier) * 1000 for earlier, later in spans]
    figures = {f"{name}_p{q}": percentile(gaps, q / 100) for q in (50, 95, 99, 99.9)}
    return figures | {f"{name}_max": max(gaps), f"num_{name}": len(gaps)}


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * share
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def with_budget(config: ResolvedConfig, budget: int) -> ResolvedConfig:
    return dataclasses.replace(config, max_num_batched_tokens=budget, max_prefill_tokens=budget)


def measure(rounds: int, budgets: Sequence[int], seed: int, every_s: float) -> dict[str, Any]:
    """Measure all budgets in turn, round by round, with fresh prompts each time."""
    traffic = dataclasses.replace(ON_CPU, every_s=every_s)
    asked = EngineConfig(  # no drafts, so that each gap is one token
        device="cpu",
        quantize="none",
        max_num_seqs=16,
        kv_cache_memory_gib=2.0,
        speculative=SpeculativeConfig(method="none"),
    )
    executor, resolved = create_executor(prepare_model(DEFAULT_MODEL, progress=False), asked)
    cells: dict[int, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for number in range(rounds):
        for budget in budgets:
            cells[budget].append(MixedLoad(executor, with_budget(resolved, budget), seed + number, traffic).run())
            print(budget if budget < WHOLE else "off", cells[budget][-1], flush=True)
    executor.shutdown()
    summary = [{"budget": budget, **medians(found)} for budget, found in cells.items()]
    config = dataclasses.asdict(resolved)
    return {"benchmark": "mixed_load", **machine(), "seed": seed, "rounds": rounds} | {
        "load": dataclasses.asdict(traffic),
        "config": config,
        "cells": summary,
    }


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and most over the rounds of each figure; valid only if every round was."""
    names = [name for name in rounds[0] if name != "valid" and all(name in result for result in rounds)]
    figures = {name: [result[name] for result in rounds] for name in names}
    spread = {name: [statistics.median(values), min(values), max(values)] for name, values in figures.items()}
    return {"valid": all(result["valid"] for result in rounds), **spread}


def table(document: dict[str, Any]) -> str:
    """Render the table of docs/benchmarks/chunking.md: medians over rounds in milliseconds, with minimum and maximum in
    brackets."""
    columns = {
        "gap_p50": "gap p50",
        "gap_p99": "p99",
        "gap_p99.9": "p99.9",
        "gap_max": "max",
        "ttft_p50": "long TTFT p50",
    }
    lines = [f"| tokens a step | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for cell in document["cells"]:
        name = "whole prompts" if cell["budget"] >= WHOLE else str(cell["budget"])
        found = [f"{cell[key][0]:.0f} ({cell[key][1]:.0f}–{cell[key][2]:.0f})" for key in columns]
        lines.append(f"| {name} | {' | '.join(found)} |" if cell["valid"] else f"| {name} | invalid run |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.mixed",
        description="Measure how long running streams stand still while long prompts are prefilled beside them, for "
        "several token budgets. It runs the engine directly, without a server. The last line is one JSON document.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all budgets (%(default)s)")
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="*",
        default=[WHOLE, 512, 256, 128],
        help="token budgets of a step to compare (max_num_batched_tokens)",
    )
    parser.add_argument(
        "--every-s",
        type=float,
        default=ON_CPU.every_s,
        help="seconds between long prompts; more than one prompt takes, or they queue (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    document = measure(options.rounds, options.budgets, options.seed, options.every_s)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
