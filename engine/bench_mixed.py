"""Owns the mixed-load measurement: how long running streams stand still while long prompts are prefilled beside them.
Never uses a server or threads: one loop submits what is due, steps the engine, and stamps every token as it comes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.core import EngineCore
from engine.executor import create_executor
from engine.machine import machine
from engine.prepare import prepare_model
from engine.protocol import Failed, SamplingParams, Submission, Token
from engine.request import create_request
from engine.step import Executor, RowKind, StepPlan

STREAMS, STREAM_PROMPT, STREAM_ANSWER, HEAD_START = 4, 48, 1500, 40
PROMPTS, PROMPT_TOKENS, EVERY_S = 5, 1500, 5.0
WHOLE = 1 << 20
"""A budget that no prompt reaches: chunking is off."""


class _Watched:
    """Notices whether any step carried prefill beside all streams: without one, nothing was measured."""

    def __init__(self, executor: Executor) -> None:
        self.collect, self.forget, self.shutdown = executor.collect, executor.forget, executor.shutdown
        self.capabilities = executor.capabilities
        self._launch = executor.launch
        self.num_mixed_steps = 0

    def launch(self, plan: StepPlan) -> None:
        num_decode = sum(row.kind is RowKind.DECODE for row in plan.rows)
        self.num_mixed_steps += num_decode == STREAMS and len(plan.rows) > num_decode
        self._launch(plan)


class MixedLoad:
    """Four streams decode; after a head start, five long prompts arrive on time, whatever the engine does."""

    def __init__(self, executor: Executor, config: ResolvedConfig, seed: int, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._watched = _Watched(executor)
        self._core = EngineCore(self._watched, config)
        self._draw = random.Random(seed)
        self._vocab = config.vocab_size
        self._tickets = 0
        self._stamps: dict[str, list[float]] = defaultdict(list)
        self._submitted: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        for i in range(STREAMS):
            self._submit(f"stream {i}", STREAM_PROMPT, STREAM_ANSWER)
        while min(len(self._stamps[f"stream {i}"]) for i in range(STREAMS)) < HEAD_START:
            self._step()
        start = time.perf_counter()
        while len(self._submitted) < STREAMS + PROMPTS or any(not self._stamps[p] for p in self._prompts()):
            due = self._tickets - STREAMS
            if due < PROMPTS and time.perf_counter() >= start + due * self._every_s:
                self._submit(f"prompt {due}", PROMPT_TOKENS, 1)
            self._step()
        end = time.perf_counter()
        for request_id in list(self._submitted):
            self._core.abort(request_id)
        return self._figures(start, end)

    def _prompts(self) -> list[str]:
        return [f"prompt {i}" for i in range(PROMPTS)]

    def _submit(self, request_id: str, prompt: int, answer: int) -> None:
        ids = tuple(self._draw.randrange(self._vocab) for _ in range(prompt))
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._core.submit(create_request(Submission(request_id, ids, params), self._core.config, self._tickets))
        self._submitted[request_id] = time.perf_counter()
        self._tickets += 1

    def _step(self) -> None:
        events = self._core.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Failed):  # its gaps would be missing, and the rest would look well
                raise RuntimeError(f"{event.request_id} failed: {event.message}")
            if isinstance(event, Token):
                self._stamps[event.request_id].append(now)

    def _figures(self, start: float, end: float) -> dict[str, Any]:
        """Milliseconds. Gaps between tokens of the streams while prompts arrive, and `alone` before that."""
        gaps: list[float] = []
        alone: list[float] = []
        for i in range(STREAMS):
            for earlier, later in pairwise(self._stamps[f"stream {i}"]):
                if later <= end:
                    (alone if later < start else gaps).append((later - earlier) * 1000)
        first = [(self._stamps[p][0] - self._submitted[p]) * 1000 for p in self._prompts()]
        return {
            "alone_p50": statistics.median(alone),
            **{f"gap_p{q}": percentile(gaps, q / 100) for q in (50, 99, 99.9)},
            "gap_max": max(gaps),
            "ttft_p50": statistics.median(first),
            "ttft_max": max(first),
            "valid": self._watched.num_mixed_steps > 0,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * share
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def with_budget(config: ResolvedConfig, budget: int) -> ResolvedConfig:
    return dataclasses.replace(config, max_num_batched_tokens=budget, max_prefill_tokens=budget)


def measure(rounds: int, budgets: Sequence[int], seed: int, every_s: float) -> dict[str, Any]:
    """All budgets in turn, round by round, with fresh prompts each time."""
    asked = EngineConfig(max_num_seqs=16, speculative=SpeculativeConfig(method="none"))  # a gap is one token's
    executor, resolved = create_executor(prepare_model(DEFAULT_MODEL, progress=False), asked)
    cells: dict[int, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for number in range(rounds):
        for budget in budgets:
            cells[budget].append(MixedLoad(executor, with_budget(resolved, budget), seed + number, every_s).run())
            print(budget if budget < WHOLE else "off", cells[budget][-1], flush=True)
    executor.shutdown()
    load = {"streams": STREAMS, "prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "every_s": every_s}
    summary = [{"budget": budget, **_summary(found)} for budget, found in cells.items()]
    config = dataclasses.asdict(resolved)
    return {"benchmark": "mixed_load", **machine(), "seed": seed, "rounds": rounds, "load": load} | {
        "config": config,
        "cells": summary,
    }


def _summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, least and most over the rounds of each figure; valid only if every round was."""
    names = [name for name in rounds[0] if name != "valid"]
    figures = {name: [found[name] for found in rounds] for name in names}
    spread = {name: [statistics.median(values), min(values), max(values)] for name, values in figures.items()}
    return {"valid": all(found["valid"] for found in rounds), **spread}


def table(document: dict[str, Any]) -> str:
    """The README's table: medians over rounds, least and most in brackets, milliseconds."""
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
    parser = argparse.ArgumentParser(prog="python -m engine.bench_mixed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="*", default=[WHOLE, 512, 256, 128])
    parser.add_argument("--every-s", type=float, default=EVERY_S, help="more than a prompt takes, or they queue")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--out", type=Path, help="also write the JSON document there")
    options = parser.parse_args(arguments)
    document = measure(options.rounds, options.budgets, options.seed, options.every_s)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
