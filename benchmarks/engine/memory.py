"""Owns the measurement with scarce KV memory: it compares ways to reserve memory when answers end far below max_tokens.
Never uses a server or threads: one loop submits due requests, steps the engine, and timestamps every token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.engine.mixed import percentile
from benchmarks.machine import machine
from engine.config import DEFAULT_MODEL, EngineConfig, FakeConfig, ResolvedConfig, SchedulerConfig, SpeculativeConfig
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.protocol import TERMINAL, Failed, Finished, FinishReason, SamplingParams, Submission, Token
from engine.scheduling.request import create_request
from engine.step import Executor, RowKind, StepOutput, StepPlan

STOP, OTHER = 0, 1
"""The scripted stop token, and the token that replaces it where the model samples it too early."""
STUDIED = 4096
"""max_tokens of the study that this is scaled down from. Its 600 steps of decay were three quarters of an answer."""
COMPARED = {
    "full": ("output_tokens_per_s", "steps", "mean_running", "ttft_p50_ms", "ttft_p99_ms"),
    "prompt": ("output_tokens_per_s", "retractions_per_request", "recomputed_share", "gap_p99_ms"),
}
COLUMNS = (
    *("output_tokens_per_s", "steps", "mean_running", "ttft_p50_ms", "gap_p99_ms", "gap_max_ms"),
    *("retractions_per_request", "recomputed_share"),
)
Rounds = list[dict[str, Any]]


def cells(max_tokens: int) -> dict[str, SchedulerConfig]:
    """Return the ways to reserve. `ratio_scaled` decays as fast relative to these answers as `ratio` does in the
    study."""
    ratio = SchedulerConfig(reserve_mode="ratio", preempt_policy="retract")
    steps = max(ratio.ratio_decay_steps * max_tokens // STUDIED, 1)
    return {
        "full": SchedulerConfig(reserve_mode="full", preempt_policy="none"),
        "learned": SchedulerConfig(reserve_mode="learned", preempt_policy="retract"),
        "ratio": ratio,
        "ratio_scaled": dataclasses.replace(ratio, ratio_decay_steps=steps),
        "prompt": SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=1),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    """The request's limit, which is all that the scheduler knows about the answer's length."""
    length: int
    """Tokens after which the answer ends, including the stop token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals with uniformly distributed lengths, and a KV cache for a share of their maximum demand."""

    requests: int
    per_s: float
    max_tokens: int
    pool_share: float
    prompt: tuple[int, int] = (64, 192)
    answered: tuple[float, float] = (0.1, 0.3)
    """Bounds of the answer's length, as shares of max_tokens."""

    def draw(self, seed: int, vocab_size: int) -> list[Arrival]:
        draw, at_s, arrivals = random.Random(seed), 0.0, []
        for _ in range(self.requests):
            at_s += draw.expovariate(self.per_s)
            ids = tuple(draw.choices(range(vocab_size), k=draw.randint(*self.prompt)))
            length = max(round(self.max_tokens * draw.uniform(*self.answered)), 2)
            arrivals.append(Arrival(at_s, ids, self.max_tokens, length))
        return arrivals

    def pool_blocks(self, prompts: Iterable[int], block_size: int) -> int:
        """Return the share of the blocks that requests with these prompts would hold if every answer used
        max_tokens."""
        return math.ceil(self.pool_share * sum(-(-(n + self.max_tokens - 1) // block_size) for n in prompts))


class ScriptedEnds:
    """Ends each answer at its scripted length, and counts computed tokens and those computed again after a preemption.

    It replaces the token that the model sampled at the scripted end by a stop token, and the core ends the request as
    usual. The forward pass and the sampling of that token are paid for, the length is not known before, and memory is
    released by the usual path. So the cost is that of an answer that ended by itself.
    """

    def __init__(self, executor: Executor, arrivals: Sequence[Arrival]) -> None:
        self._executor, self._arrivals = executor, arrivals
        self.forget, self.shutdown = executor.forget, executor.shutdown
        self.capabilities = executor.capabilities
        self._launched: deque[StepPlan] = deque()
        self._reached = [0] * len(arrivals)
        self.num_computed = self.num_recomputed = 0
        self.newest = StepPlan(0, ())

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        self._launched.append(plan)
        self.newest = plan
        for row in plan.rows:
            number = int(row.request_id)
            self.num_computed += len(row.token_ids)
            self.num_recomputed += max(min(row.end, self._reached[number]) - row.start, 0)
            self._reached[number] = max(row.end, self._reached[number])

    def collect(self) -> StepOutput:
        output, plan = self._executor.collect(), self._launched.popleft()
        sampled = []
        for row, tokens in zip(plan.rows, output.sampled, strict=True):
            arrival = self._arrivals[int(row.request_id)]
            position = row.start + 1 if row.kind is RowKind.DECODE else row.end  # of the first sampled token
            numbered = enumerate(tokens, position - len(arrival.prompt) + 1)  # from 1
            sampled.append(tuple(_scripted(token, number >= arrival.length) for number, token in numbered))
        return dataclasses.replace(output, sampled=tuple(sampled))


def _scripted(token: int, ends: bool) -> int:
    return STOP if ends else OTHER if token == STOP else token


class KvTight:
    """One cell: runs all arrivals through one engine with its own scheduler until the last answer ends."""

    def __init__(self, executor: Executor, config: ResolvedConfig, arrivals: Sequence[Arrival]) -> None:
        self._arrivals, self._config = arrivals, config
        self._scripted = ScriptedEnds(executor, arrivals)
        self._core = EngineCore(self._scripted, config)
        self._stamps: dict[int, list[float]] = defaultdict(list)
        self._ends: dict[int, Finished | Failed] = {}
        self._running_s = 0.0
        self._peak_blocks = self._num_deferrals = 0

    def run(self) -> dict[str, Any]:
        start = now = time.perf_counter()
        due = deque(enumerate(self._arrivals))
        while len(self._ends) < len(self._arrivals):
            while due and start + due[0][1].at_s <= now:
                self._submit(*due.popleft())
            if self._core.has_work:
                now = self._step(now)
            else:
                time.sleep(max(start + due[0][1].at_s - now, 0))
                now = time.perf_counter()
        return self._figures(start, now)

    def _submit(self, number: int, arrival: Arrival) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True, stop_token_ids=(STOP,), seed=number
        )
        self._core.submit(create_request(Submission(str(number), arrival.prompt, params), self._config, number))

    def _step(self, before: float) -> float:
        """Run one step. Its running requests are those that run after it and those that it ended."""
        num_ended, events = len(self._ends), self._core.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token):
                self._stamps[int(event.request_id)].append(now)
            elif isinstance(event, TERMINAL):
                self._ends[int(event.request_id)] = event
        load = self._core.load()
        running = load.num_running + len(self._ends) - num_ended
        self._running_s += running * (now - before)
        self._peak_blocks = max(self._peak_blocks, load.num_held_blocks)
        self._num_deferrals += load.num_waiting > 0 and self._lacked_memory_only(running)
        return now

    def _lacked_memory_only(self, num_running: int) -> bool:
        """Whether the newest step had a free seat, room for a block's tokens and no partial prompt, so that waiting
        requests lacked only memory."""
        plan, config = self._scripted.newest, self._config
        prefill = sum(len(row.token_ids) for row in plan.rows if row.kind is not RowKind.DECODE)
        room = min(config.max_num_batched_tokens - plan.num_tokens, config.max_prefill_tokens - prefill)
        partial = any(row.kind is RowKind.MIDDLE for row in plan.rows)
        return num_running < config.max_num_seqs and room >= config.block_size and not partial

    def _figures(self, start: float, end: float) -> dict[str, Any]:
        """Return the cell's figures. TTFT counts from when a request was due, up to a step before it was submitted."""
        gaps = [(later - earlier) * 1000 for stamps in self._stamps.values() for earlier, later in pairwise(stamps)]
        first = [(stamps[0] - start - self._arrivals[n].at_s) * 1000 for n, stamps in self._stamps.items()]
        errors = sum(not self._ended_as_scripted(number) for number in range(len(self._arrivals)))
        peak, computed = self._peak_blocks / self._config.num_kv_blocks, self._scripted.num_computed
        return {
            "wall_s": end - start,
            "output_tokens_per_s": sum(arrival.length for arrival in self._arrivals) / (end - start),
            "mean_running": self._running_s / (end - start),
            **{f"ttft_p{q}_ms": percentile(first, q / 100) for q in (50, 99)},
            **{f"gap_p{q}_ms": percentile(gaps, q / 100) for q in (50, 99)},
            "gap_max_ms": max(gaps),
            "steps": self._core.load().num_steps,
            "retractions_per_request": self._core.load().num_preemptions / len(self._arrivals),
            "computed_tokens": computed,
            "recomputed_tokens": self._scripted.num_recomputed,
            "recomputed_share": self._scripted.num_recomputed / computed,
            "peak_held_share": peak,
            "memory_deferrals": self._num_deferrals,
            "errors": errors,
            "valid": errors == 0 and (peak >= 0.9 or self._num_deferrals > 0),
        }

    def _ended_as_scripted(self, number: int) -> bool:
        end, length = self._ends[number], self._arrivals[number].length
        stopped = isinstance(end, Finished) and end.reason is FinishReason.STOP
        return stopped and len(self._stamps[number]) == length - 1


def measure(load: Load, asked: EngineConfig, rounds: int, seed: int) -> dict[str, Any]:
    """Run all cells in every round, on the round's own arrivals. Each round begins with another cell."""
    most = load.pool_blocks([load.prompt[1]] * load.requests, asked.block_size)
    executor, resolved = _create(dataclasses.replace(asked, num_kv_blocks=most))
    KvTight(executor, resolved, load.draw(seed - 1, resolved.vocab_size)[:4]).run()  # warms up
    schedulers = cells(load.max_tokens)
    names = list(schedulers)
    found: dict[str, Rounds] = {name: [] for name in names}
    for number in range(rounds):
        arrivals = load.draw(seed + number, resolved.vocab_size)
        pool = load.pool_blocks([len(arrival.prompt) for arrival in arrivals], resolved.block_size)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            config = dataclasses.replace(resolved, num_kv_blocks=pool, scheduler=schedulers[name])
            found[name].append(KvTight(executor, config, arrivals).run())
            print(number, name, found[name][-1], flush=True)
    executor.shutdown()
    return {"benchmark": "kv_tight", **machine(), "seed": seed, "rounds": rounds, "load": dataclasses.asdict(load)} | {
        "executor": asked.executor,
        "config": dataclasses.asdict(resolved),
        "cells": [{"cell": n, "scheduler": dataclasses.asdict(schedulers[n]), **_summary(found[n])} for n in names],
        "ratios": {f"to_{base}": _ratios(found, base) for base in COMPARED},
    }


def _create(asked: EngineConfig) -> tuple[Executor, ResolvedConfig]:
    if asked.executor == "torch":
        from engine.build.executor import create_executor
        from engine.checkpoints.prepare import prepare_model

        whole = dataclasses.replace(asked, quantize="none")  # weights in bfloat16
        return create_executor(prepare_model(DEFAULT_MODEL, progress=False), whole)
    blocks = asked.num_kv_blocks or 1
    fixed: dict[str, Any] = {"max_model_len": 1 << 16, "vocab_size": 32, "eos_token_ids": (), "num_threads": 1}
    resolved = ResolvedConfig.of(asked, num_kv_blocks=blocks, dtype="none", device="none", kernels="fake", **fixed)
    return FakeExecutor(blocks, asked.block_size, range(32), config=asked.fake), resolved


def _summary(rounds: Rounds) -> dict[str, Any]:
    """Return median, minimum and maximum over the rounds of each figure; valid only if every round was."""
    figures = {name: [result[name] for result in rounds] for name in rounds[0] if name != "valid"}
    spread = {name: [statistics.median(values), min(values), max(values)] for name, values in figures.items()}
    return {"valid": all(result["valid"] for result in rounds), **spread}


def _ratios(found: dict[str, Rounds], base: str) -> dict[str, dict[str, Any]]:
    """Return the ratio of each other cell's median to that of `base`, then minimum and maximum over rounds; None if
    `base` is 0."""
    ratios: dict[str, dict[str, Any]] = {name: {} for name in found if name != base}
    for name, figure in product(ratios, COMPARED[base]):
        values, bases = ([figures[figure] for figures in found[cell]] for cell in (name, base))
        by_round = [value / low for value, low in zip(values, bases, strict=True)] if all(bases) else []
        middle = statistics.median(values) / (statistics.median(bases) or 1)
        spread = (middle, min(by_round), max(by_round)) if by_round else None
        ratios[name][figure] = [round(value, 4) for value in spread] if spread else None
    return ratios


def table(document: dict[str, Any]) -> str:
    """Render medians over rounds, with minimum and maximum in brackets."""
    lines = [f"| reserve | {' | '.join(COLUMNS).replace('_', ' ')} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for cell in document["cells"]:
        spread = [[f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in cell[name]] for name in COLUMNS]
        found = [f"{median} ({least}–{most})" for median, least, most in spread] if cell["valid"] else ["invalid run"]
        lines.append(f"| {cell['cell']} | {' | '.join(found)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.memory",
        description="Compare the ways to reserve memory where it is scarce and answers end far below max_tokens. It "
        "runs the engine directly, without a server. The last line is one JSON document.",
    )
    parser.add_argument(
        "--executor", choices=["torch", "fake"], default="torch", help="the model, or scripted tokens (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all ways (%(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="requests in a round (%(default)s)")
    parser.add_argument("--per-s", type=float, default=16.0, help="mean arrivals a second (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="max_tokens of each request (%(default)s)")
    parser.add_argument(
        "--pool-share",
        type=float,
        default=0.3,
        help="size of the KV cache, as a share of the blocks that max_tokens of all requests would take (%(default)s)",
    )
    parser.add_argument("--num-threads", type=int, help="threads of the executor; all cores if not given")
    parser.add_argument(
        "--prefix-caching",
        action="store_true",
        help="switch the prefix cache on; it hides what is computed again after a preemption",
    )
    parser.add_argument(
        "--token-delay-ms",
        type=float,
        default=0.0,
        help="time for each token of the fake executor, in ms (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 1_000_000,
        help="seed of the load; another one each time if not given",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    load = Load(options.requests, options.per_s, options.max_tokens, options.pool_share)
    asked = EngineConfig(
        executor=options.executor,
        max_num_seqs=max(options.requests, 1),
        num_threads=options.num_threads,
        enable_prefix_caching=options.prefix_caching,
        speculative=SpeculativeConfig(method="none"),  # so that an answer takes as many steps as it has tokens
        fake=FakeConfig(token_delay_ms=options.token_delay_ms),
    )
    document = measure(load, asked, options.rounds, options.seed)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    for base, ratios in document["ratios"].items():
        for name, figures in ratios.items():
            print(base, name, figures)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
