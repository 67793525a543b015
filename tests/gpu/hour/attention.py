"""Owns timings of attention alone: over lengths, splits and block sizes, and beside the machine's other packages.
Never compares results: the GPU tests do."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine.gpu import BLOCK_SIZE
from benchmarks.kernels import NARROW_CACHES, Bench, measure
from kernels.choice import FLASH, TRITON, choose_attention
from kernels.eager.ops import TORCH, Ops
from kernels.rows.device import on_device
from kernels.rows.step import PagedRows
from tests.gpu.hour.phases import NARROW_SHAPES, OVER_NARROW, STAND_IN

logger = logging.getLogger(__name__)

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
Run = Callable[[], object]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Case:
    """Rows that decode after `context` tokens, or that have a chunk of `chunk` tokens there."""

    rows: int
    context: int
    chunk: int = 0

    @property
    def name(self) -> str:
        if not self.chunk:
            return f"decode {self.rows} x {self.context}"
        return f"chunk of {self.chunk}" + (f" after {self.rows} x {self.context}" if self.context else "")

    def paged(self, block_size: int) -> PagedRows:
        count = self.chunk or 1
        blocks = -(-(self.context + count) // block_size)
        tables = torch.arange(self.rows * blocks).view(self.rows, blocks)
        num_decode = 0 if self.chunk else self.rows
        return PagedRows(num_decode, (self.context,) * self.rows, (count,) * self.rows, tables, block_size)

    @property
    def num_bytes(self) -> int:
        """The bytes of K and V, which are all that is read."""
        return 2 * self.rows * (self.context + (self.chunk or 1)) * KV_HEADS * HEAD_DIM * 2


FULL = (
    *(Case(64, 1024), Case(64, 8192), Case(256, 1024), Case(16, 1024), Case(1, 1024), Case(1, 8192), Case(1, 0, 8192)),
    *(Case(1, 32_000, 50), Case(1, 32_000, 5), Case(64, 8192, 5)),
)
"""Kernels are autotuned on the first. The last are a suffix of a cached prefix, and unverified drafts."""
TINY = (Case(2, 40), Case(1, 0, 24), Case(1, 30, 3))


def _bench(options: argparse.Namespace) -> tuple[Bench, Sequence[Case]]:
    rehearsal = options.device == STAND_IN
    where = torch.device("cpu" if rehearsal else "cuda")
    bench = Bench(argparse.Namespace(runs=2 if rehearsal else 10), where, torch.bfloat16, torch.Generator(where))
    return bench, TINY if rehearsal else FULL


def _timed(bench: Bench, case: Case, make: Callable[[], Run], capturable: bool = True) -> dict[str, Any]:
    """Time a case. If it fails, the others still run."""
    try:
        return {"us": min(measure(bench, make, case.num_bytes, capturable=capturable))}
    except Exception as error:
        logger.exception("%s failed", case.name)
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _paged_run(
    bench: Bench, case: Case, table: Ops, block_size: int, kept_in: torch.dtype | None = None, **of_plan: int
) -> Run:
    """Return a run of paged attention. kept_in: K and V in 8 bits; of_plan: values of a captured step's plan in place
    of the step's own."""
    rows = case.paged(block_size)
    cache = bench.cache((rows.block_tables.numel(), block_size, KV_HEADS, HEAD_DIM), kept_in)
    q = bench.random(case.rows * (case.chunk or 1), KV_HEADS * GROUP, HEAD_DIM)
    plan = table.prepare_attention(on_device(rows, bench.device) if table.capturable else rows, KV_HEADS, bench.dtype)
    if of_plan:
        plan = replace(plan, rows=None, **of_plan)
    return lambda: table.attention(q, *cache, plan, HEAD_DIM**-0.5)


def _contiguous_run(bench: Bench, case: Case) -> Run:
    """Return a run of torch's own attention on contiguous K and V, which no paged kernel is expected to beat."""
    keys, count = case.context + (case.chunk or 1), case.chunk or 1
    q = bench.random(case.rows, KV_HEADS * GROUP, count, HEAD_DIM)
    k, v = (bench.random(case.rows, KV_HEADS, keys, HEAD_DIM) for _ in "kv")
    of_prompt = bool(case.chunk) and not case.context  # torch's own causal mask begins at the first key
    of_suffix = bool(case.chunk and case.context)
    seen = torch.ones(count, keys, dtype=torch.bool, device=q.device).tril(case.context)
    mask = seen if of_suffix else None

    def run() -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=of_prompt, enable_gqa=True)

    return run


def _tables(bench: Bench, block_size: int) -> Iterator[tuple[str, Ops]]:
    """Yield the tables that can run here, by name."""
    capability = torch.cuda.get_device_capability() if bench.on_gpu else None
    for name in (TRITON, FLASH):
        try:
            found = choose_attention(
                name, dtype=bench.dtype, head_dim=HEAD_DIM, block_size=block_size, capability=capability
            )[1]
        except ValueError as error:
            print(f"no {name}: {error}", flush=True)
        else:
            yield name, found
    if not bench.on_gpu:
        yield "torch", TORCH


def sweep(options: argparse.Namespace, keep: Keep) -> None:
    """Time Triton's attention with several block sizes: eagerly, and as in captures for longer rows than there are,
    with other splits, too."""
    bench, cases = _bench(options)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for block_size in (16, 64, 128):
            name, table = next(_tables(bench, block_size))
            for case in cases:
                for plan in _plans(case, bench.on_gpu):
                    make = partial(_paged_run, bench, case, table, block_size, **plan)
                    cell = {"shape": case.name, "by": name, "block_size": block_size, "bytes": case.num_bytes, **plan}
                    found.append(cell | _timed(bench, case, make, table.capturable))
                    print(found[-1], flush=True)
                    keep({"cells": found})


def _plans(case: Case, on_gpu: bool) -> list[dict[str, int]]:
    if not on_gpu:
        return [{}]
    longest = [{"max_length": length} for length in (2048, 32768) if length > case.context + case.chunk]
    splits = [] if case.chunk else [{"max_length": 32768, "split": split} for split in (128, 256, 512, 1024, 2048)]
    return [{}, *longest, *splits]


def packages(options: argparse.Namespace, keep: Keep) -> None:
    """Time Triton's attention beside FlashAttention, if installed, torch's attention on contiguous K and V, and its own
    over K and V in 8 bits."""
    bench, cases = _bench(options)
    found: list[dict[str, Any]] = []

    def note(case: Case, by: str, make: Callable[[], Run], capturable: bool = True) -> None:
        found.append({"shape": case.name, "by": by} | _timed(bench, case, make, capturable))
        print(found[-1], flush=True)
        keep({"cells": found})

    with torch.inference_mode():
        tables = list(_tables(bench, BLOCK_SIZE))
        for case in cases:
            for name, table in tables:
                note(case, name, partial(_paged_run, bench, case, table, BLOCK_SIZE), table.capturable)
                narrow = table.narrow_cache and case.name in NARROW_SHAPES
                for kept_in, dtype in NARROW_CACHES.items() if narrow else ():
                    note(
                        case,
                        f"{name}{OVER_NARROW}{kept_in}",
                        partial(_paged_run, bench, case, table, BLOCK_SIZE, dtype),
                    )
            note(case, "torch's attention on contiguous K and V", partial(_contiguous_run, bench, case))
