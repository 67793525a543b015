"""Owns the measurement of KV that moves: how fast blocks go to each tier and come back, and what that costs a step.
Never schedules: it hands moves to the mover, and plans of given shapes to the executor. The last line of output is one
JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.engine.step import decode_plan, measure, prefill_plan, step_of
from benchmarks.machine import machine
from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, KvTiersConfig
from engine.execution.executor import ModelExecutor
from engine.kv_tiers import BlockMove, KvMover, MoveKind, Tier
from engine.step import StepPlan

BLOCK_SIZE = 16
BESIDE = 64
"""Blocks that are loaded over and over beside a step."""


class Mover:
    """A mover whose moves are waited for."""

    def __init__(self, mover: KvMover) -> None:
        self.mover, self._ids, self._woken = mover, count(), threading.Event()
        mover.on_result(self._woken.set)

    def run(self, kind: MoveKind, tier: Tier, digests: Sequence[bytes]) -> tuple[float, float]:
        """Move blocks 0, 1, ... and return (seconds on the step's thread, seconds until the last has ended).

        Raises:
            RuntimeError: a move failed.
        """
        moves = [BlockMove(next(self._ids), kind, tier, digest, number) for number, digest in enumerate(digests)]
        began = time.perf_counter()
        self.mover.begin(moves)
        begun = time.perf_counter() - began
        self._wait(len(moves))
        return begun, time.perf_counter() - began

    def drop(self, tier: Tier, digests: Sequence[bytes]) -> None:
        self.mover.begin([], [(tier, digest) for digest in digests])

    def _wait(self, missing: int) -> None:
        while missing:
            self._woken.clear()
            results = self.mover.take_results()
            if failed := [result.error for result in results if result.error]:
                raise RuntimeError(f"a move failed: {failed[0]}")
            missing -= len(results)
            if missing and not results:
                self._woken.wait()


def digests_of(number: int, blocks: int) -> list[bytes]:
    """Return names that no other call has."""
    return [number.to_bytes(8, "little") + block.to_bytes(8, "little") for block in range(blocks)]


def measure_moves(mover: Mover, tier: Tier, blocks: int, rounds: int, names: Iterator[int]) -> list[dict[str, Any]]:
    """Store as many blocks in one call, and load them, `rounds` times. The first time, which takes new memory from the
    system, is apart."""
    times: dict[MoveKind, list[tuple[float, float]]] = {kind: [] for kind in MoveKind}
    for _ in range(rounds + 1):
        digests = digests_of(next(names), blocks)
        for kind, found in times.items():
            found.append(mover.run(kind, tier, digests))
        mover.drop(tier, digests)
    size = blocks * mover.mover.block_bytes
    cells = []
    for kind, found in times.items():
        seconds = [whole for _, whole in found[1:]]
        cells.append(
            {
                "tier": str(tier),
                "move": kind.value,
                "blocks": blocks,
                "step_thread_us_p50": 1e6 * statistics.median(begun for begun, _ in found[1:]),
                "first_step_thread_us": 1e6 * found[0][0],
                "ms_p50": 1e3 * statistics.median(seconds),
                "ms_max": 1e3 * max(seconds),
                "mb_per_s": size / statistics.median(seconds) / 1e6,
            }
        )
    return cells


@contextmanager
def loads_beside(mover: Mover, tier: Tier, blocks: int, names: Iterator[int]) -> Iterator[None]:
    """Load blocks over and over in the body. Another thread begins them, which the body must not do meanwhile."""
    digests, ended = digests_of(next(names), blocks), threading.Event()
    mover.run(MoveKind.STORE, tier, digests)

    def load() -> None:
        while not ended.is_set():
            mover.run(MoveKind.LOAD, tier, digests)

    thread = threading.Thread(target=load)
    thread.start()
    yield
    ended.set()
    thread.join()
    mover.drop(tier, digests)


def measure_step(
    executor: ModelExecutor, mover: Mover, plan: StepPlan, new_blocks: int, steps: int, names: Iterator[int]
) -> dict[str, Any]:
    """Measure a step alone, with a store of `new_blocks` before it, and beside loads."""
    run, tier = step_of(executor, plan), mover.mover.tiers[0]

    def with_stores() -> None:
        digests = digests_of(next(names), new_blocks)
        mover.run(MoveKind.STORE, tier, digests)
        run()
        mover.drop(tier, digests)

    alone, stored = statistics.median(measure(run, steps)), statistics.median(measure(with_stores, steps))
    with loads_beside(mover, tier, BESIDE, names):
        beside = statistics.median(measure(run, steps))
    return {
        "tokens": plan.num_tokens,
        "new_blocks": new_blocks,
        "ms_p50": alone,
        "with_stores_ms_p50": stored,
        "stores_percent": 100 * (stored / alone - 1),
        "beside_loads_ms_p50": beside,
        "loads_percent": 100 * (beside / alone - 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    most = max(*options.blocks, BESIDE)
    config = EngineConfig(
        dtype=options.dtype,
        kernels=options.kernels,
        load_format=options.load_format,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(most, (options.rows + 1) * -(-(options.context + 512) // BLOCK_SIZE)),
        kv_tiers=KvTiersConfig(
            host_memory_gib=options.host_gib,
            disk_path=None if options.disk is None else str(options.disk),
        ),
    )
    model = prepare_model(options.model, weights=options.load_format != "dummy")
    executor, resolved = create_executor(model, config)
    kv_mover = executor.capabilities.kv_mover
    assert kv_mover is not None
    mover, names = Mover(kv_mover), count(options.seed << 20)
    moves = [
        cell
        for tier in kv_mover.tiers
        for blocks in options.blocks
        for cell in measure_moves(mover, tier, blocks, options.rounds, names)
    ]
    for cell in moves:
        print(
            "{tier:5} {move:6} {blocks:4} blocks {mb_per_s:9.1f} MB/s, {step_thread_us_p50:9.1f} us of a step's thread "
            "(first {first_step_thread_us:.1f})".format(**cell)
        )
    draw = _tokens(options.seed, resolved.vocab_size)
    plans = [
        (decode_plan(options.rows, options.context, BLOCK_SIZE, draw), -(-options.rows // BLOCK_SIZE)),
        (prefill_plan(options.prefill, options.context, BLOCK_SIZE, draw), options.prefill // BLOCK_SIZE),
    ]
    steps = [measure_step(executor, mover, plan, blocks, options.steps, names) for plan, blocks in plans]
    for cell in steps:
        print(
            "step of {tokens:4} tokens {ms_p50:8.2f} ms; with {new_blocks} stores {stores_percent:+.1f} %; beside "
            "loads {loads_percent:+.1f} %".format(**cell)
        )
    executor.shutdown()
    result = {"benchmark": "kv_moves", **machine(), "model": options.model, "seed": options.seed}
    result |= {"config": dataclasses.asdict(resolved), "block_bytes": kv_mover.block_bytes}
    document = json.dumps({**result, "moves": moves, "steps": steps})
    if options.out:
        options.out.write_text(document + "\n")
    print(document)


def _tokens(seed: int, vocab_size: int) -> Callable[[], int]:
    generator = random.Random(seed)
    return lambda: generator.randrange(vocab_size)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.kv_moves",
        description="Measure how fast KV blocks move to the tiers below the KV cache and back, how long a step's "
        "thread is kept by that, and how much longer steps take. The last line is one JSON document.",
        epilog="The page cache answers what was written a moment ago: what a disk itself reads is less.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (%(default)s)")
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=["auto", "dummy"],
        help="dummy: random weights in the model's shape (%(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="type of weights and activations (%(default)s)")
    parser.add_argument("--kernels", default="auto", help="what computes a step on a CPU (%(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="type of the KV cache (%(default)s)")
    parser.add_argument("--host-gib", type=float, default=0.5, help="memory of the host tier (%(default)s)")
    parser.add_argument("--disk", type=Path, help="also measure a disk tier in this directory")
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[1, 8, 64], help="blocks of one call to measure (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=16, help="rows of the decode step (%(default)s)")
    parser.add_argument("--prefill", type=int, default=256, help="tokens of the prefill step (%(default)s)")
    parser.add_argument("--context", type=int, default=200, help="cached tokens of each row (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="times that each move is measured (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps measured of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of tokens and names (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    if options.host_gib <= 0:
        parser.error(f"--host-gib is {options.host_gib:g}: steps are measured with the host tier, which needs some")
    return options


if __name__ == "__main__":
    main()
