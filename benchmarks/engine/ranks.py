"""Owns the measurement of an engine's ranks on one CPU: steps of one rank and of two with as many threads in total, and
what a step's message and a sum between ranks take. Never schedules: it hands plans of given shapes to executors."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.step import decode_plan, in_slots, prefill_plan, step_of
from benchmarks.machine import machine
from benchmarks.results import write_whole
from engine.build.executor import create_executor
from engine.build.follower import group_at
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.host.cores import usable_threads
from engine.models.config import read_model_config
from engine.models.description import Shard
from engine.parallel.messages import Step, bare, decode, encode
from engine.parallel.processes import SubprocessLauncher
from engine.step import Executor, StepPlan
from kernels.collectives.gloo import GlooGroup
from kernels.collectives.group import LEADER, Group
from kernels.collectives.shared_memory import new_directory

ONE, MEMORY, TCP = "1 rank", "2 ranks", "2 ranks over TCP"
RANKS = 2
WARM = 1
"""Steps of each kind in a round that do not count."""
_EXCHANGES = 200
"""Messages and sums in a round, of which a few percent find the other rank asleep."""


class TcpLauncher(SubprocessLauncher):
    """Children of this process that meet as on several machines."""

    remote_host: str | None = "127.0.0.1"


# --- steps ------------------------------------------------------------------------------------------------------------


def measure_steps(
    executors: Mapping[str, Executor], plans: Mapping[tuple[str, int], StepPlan], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a cell for each step and side: milliseconds of a step, the median of each round. All sides are measured in
    each round, and who is first changes."""
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        sides = list(executors)
        for kind, size in plans:
            steps = options.steps if kind == "decode" else max(2, options.steps * 64 // size)
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                if side != TCP or (kind, size) == options.over_tcp:
                    found[kind, size, side].append(_median(step_of(executors[side], plans[kind, size]), steps))
    order = [(*what, side) for what in plans for side in executors]
    return [
        {"step": kind, "size": size, "side": side, **_summary(found[kind, size, side], "ms"), "rounds": times}
        for kind, size, side in order
        if (times := [round(took, 4) for took in found[kind, size, side]])
    ]


def _median(run: Callable[[], object], steps: int) -> float:
    """Return the milliseconds of a run."""
    times = []
    for number in range(steps + WARM):
        begun = time.perf_counter()
        run()
        if number >= WARM:
            times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def _summary(times: Sequence[float], unit: str) -> dict[str, float]:
    parts = {"p50": statistics.median(times), "min": min(times), "max": max(times)} if times else {}
    return {f"{unit}_{name}": value for name, value in parts.items()}


# --- exchanges --------------------------------------------------------------------------------------------------------


def measure_exchanges(
    plans: Sequence[StepPlan], hidden: int, dtype: torch.dtype, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield cells: microseconds in which the other rank has a step's message and has answered with a sum of one number,
    in which that sum alone is done, and in which one of hidden states is."""
    for by in ("memory", "TCP"):
        with _pair(by) as group:
            times: dict[tuple[str, int], list[float]] = defaultdict(list)
            _exchanged(group, None, torch.zeros(1))  # the first ones of a process are slow
            for _ in range(rounds):
                times["one number", 1].append(_exchanged(group, None, torch.zeros(1)))
                for plan in plans:
                    times["message", len(plan.rows)].append(_exchanged(group, plan, torch.zeros(1)))
                    states = torch.zeros(len(plan.rows), hidden, dtype=dtype)
                    times["hidden states", len(plan.rows)].append(_exchanged(group, None, states))
        sizes = {len(plan.rows): len(encode(Step(bare(plan, {})))) for plan in plans}
        for (what, size), found in times.items():
            count = {"message": sizes.get(size, 0), "one number": 4}.get(what, size * hidden * dtype.itemsize)
            yield {"what": what, "size": size, "by": by, "bytes": count, **_summary(found, "us")}


def _exchanged(group: Group, plan: StepPlan | None, x: torch.Tensor) -> float:
    """Return the median of the microseconds of an exchange. The follower is told before what comes."""
    group.send(json.dumps([plan is not None, list(x.shape), str(x.dtype).removeprefix("torch.")]).encode())
    times = []
    for _ in range(_EXCHANGES):
        begun = time.perf_counter()
        if plan is not None:
            group.send(encode(Step(bare(plan, {}))))
        group.all_reduce(x)
        times.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(times)


def answer(place: Path | str) -> None:
    """Be the other rank of `measure_exchanges`, in a process of its own."""
    torch.set_num_threads(1)
    group = group_at(place, Shard(1, RANKS))
    group.join()
    while order := group.receive():
        is_told, shape, dtype = json.loads(order)
        x = torch.zeros(*shape, dtype=getattr(torch, dtype))
        for _ in range(_EXCHANGES):
            if is_told:
                decode(group.receive())
            group.all_reduce(x)
    group.close()


@contextmanager
def _pair(by: str) -> Iterator[Group]:
    """Give the leader's end of a group whose other rank answers."""
    place: Path | str = new_directory() if by == "memory" else "127.0.0.1:0"
    group = group_at(place, Shard(LEADER, RANKS))
    process = multiprocessing.get_context("spawn").Process(
        target=answer, args=(group.address if isinstance(group, GlooGroup) else place,), daemon=True
    )
    try:
        process.start()
        group.join(lambda: None if process.is_alive() else "the other rank has ended")
        yield group
        group.send(b"")
        process.join()
    finally:
        process.kill()
        group.close()


# --- the pages --------------------------------------------------------------------------------------------------------


def table(document: Mapping[str, Any]) -> str:
    """Render the steps' table of docs/benchmarks/tensor-parallel.md: medians of the rounds' medians, in milliseconds,
    with the least and the largest in brackets. The ratio is that of the same round."""
    cells = {(cell["step"], cell["size"], cell["side"]): cell for cell in document["cells"]}
    lines = [f"| step | {ONE}, ms | {RANKS} ranks, ms | ratio | over TCP, ms |", "|---|--:|--:|--:|--:|"]
    for kind, size in dict.fromkeys((kind, size) for kind, size, _ in cells):
        what = f"{size} streams decode" if kind == "decode" else f"{size:,} tokens of a prompt"
        one, two, tcp = (cells.get((kind, size, side)) for side in (ONE, MEMORY, TCP))
        ratio = _ratio(one, two)
        lines.append(f"| {what} | {_ms(one)} | {_ms(two)} | {ratio} | {_ms(tcp)} |")
    return "\n".join(lines)


def _ms(cell: Mapping[str, Any] | None) -> str:
    return "" if cell is None else "{ms_p50:.1f} ({ms_min:.1f}–{ms_max:.1f})".format(**cell)


def _ratio(one: Mapping[str, Any] | None, two: Mapping[str, Any] | None) -> str:
    if one is None or two is None:
        return ""
    found = [own / other for own, other in zip(two["rounds"], one["rounds"], strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"


def exchanges_table(document: Mapping[str, Any]) -> str:
    """Render what ranks exchange: microseconds, in memory and over TCP."""
    cells = {(cell["what"], cell["size"], cell["by"]): cell for cell in document["exchanges"]}
    lines = ["| exchange | bytes | in memory, µs | over TCP, µs |", "|---|--:|--:|--:|"]
    for what, size in dict.fromkeys((what, size) for what, size, _ in cells):
        memory, tcp = (cells[what, size, by] for by in ("memory", "TCP"))
        streams = "1 stream" if size == 1 else f"{size} streams"
        text = {
            "one number": "A sum of one number",
            "message": f"The message of a step of {streams}, and that sum",
            "hidden states": f"A sum of the hidden states of {streams}",
        }[what]
        took = [f"{cell['us_p50']:,.0f} ({cell['us_min']:,.0f}–{cell['us_max']:,.0f})" for cell in (memory, tcp)]
        lines.append(f"| {text} | {memory['bytes']:,} | {' | '.join(took)} |")
    return "\n".join(lines)


# --- the program ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    begun = time.monotonic()
    directory = prepare_model(options.model, progress=False, weights=options.load_format != "dummy")
    generator = random.Random(options.seed)
    tokens = max(max(options.rows) * (options.context + 16), options.context + max(options.prefill))
    config = EngineConfig(
        device="cpu",
        kernels="native",
        load_format=options.load_format,
        num_threads=options.threads,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=max(*options.prefill, 2 * max(options.rows)),
        num_kv_blocks=tokens // 16 + 16,
        num_speculative_tokens=0,
    )
    with ExitStack() as ended:
        executors: dict[str, Executor] = {}
        for side, ranks, launcher in ((ONE, 1, None), (MEMORY, RANKS, None), (TCP, RANKS, TcpLauncher())):
            own = replace(config, tensor_parallel_size=ranks)
            executors[side], resolved = create_executor(directory, own, launcher=launcher)
            ended.callback(executors[side].shutdown)

        def draw() -> int:
            return generator.randrange(resolved.vocab_size)

        plans = {("decode", n): decode_plan(n, options.context, resolved.block_size, draw) for n in options.rows}
        plans |= {("prefill", n): prefill_plan(n, options.context, resolved.block_size, draw) for n in options.prefill}
        plans = {what: in_slots(executors[ONE], plan) for what, plan in plans.items()}
        cells = measure_steps(executors, plans, options)
    hidden, dtype = read_model_config(directory).hidden_size, getattr(torch, resolved.dtype)
    decoding = [plan for (kind, _), plan in plans.items() if kind == "decode"]
    exchanges = list(measure_exchanges(decoding, hidden, dtype, options.rounds))
    document = {
        "benchmark": "ranks",
        **machine(),
        "model": options.model,
        "seed": options.seed,
        "threads": options.threads,
        "context": options.context,
        "rounds": options.rounds,
        "dtype": resolved.dtype,
        "cells": cells,
        "exchanges": exchanges,
        "took_s": round(time.monotonic() - begun),
    }
    if options.out:
        write_whole(options.out, document)
    print(table(document), exchanges_table(document), sep="\n\n")
    print(json.dumps(document))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.ranks",
        description="Measure steps of one rank and of two that have as many threads in total, in turn, and what the "
        "ranks' messages and sums take. The last line is one JSON document.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (%(default)s)")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"], help="dummy: random weights")
    parser.add_argument(
        "--threads", type=int, default=usable_threads()[0], help="of all ranks together (those of this machine)"
    )
    parser.add_argument("--context", type=int, default=512, help="cached tokens of each row (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="numbers of decode rows")
    parser.add_argument("--prefill", type=int, nargs="+", default=[256, 1024], help="numbers of prefill tokens")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of each kind in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds over all of it (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 1_000_000, help="of the tokens; another one each time if not given"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    options.over_tcp = ("decode", sorted(options.rows)[len(options.rows) // 2])
    return options


if __name__ == "__main__":
    main()
