"""Owns how the hour calls the benchmarks: those of single operations, and those of an engine's steps and loads.
Never measures anything itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tests.gpu.hour.phases import STAND_IN

TINY = (
    "--device cpu --heads 4 --kv-heads 2 --head-dim 16 --hidden 48 --intermediate 80 --context 40 --rows 1 3 --chunk 5 "
    "--runs 2 --linear-key-heads 2 --linear-value-heads 4 --linear-head-dim 8 --experts 6 --experts-per-token 2 "
    "--expert-size 24 --copy-mib 1 --matrix 32"
)
SEED = "5"
COPY = "--copy-mib 2048"
"""Long beside its launch."""
LITTLE = "--copy-mib 16 --matrix 512"
"""Peaks that nobody reads."""


def operations(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Benchmark single operations; the benchmark's document is the result. A rehearsal runs torch's operators."""
    from benchmarks import kernels

    kernels.main([*_sizes(options), "--seed", SEED, "--out", str(options.result)])


def compile_operations(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run a share of them once, beside the processes that run the others, so that all are compiled when they are timed:
    one process would compile for minutes, and the last operations were never reached."""
    from benchmarks import kernels

    kernels.main([*_sizes(options), "--runs", "1", *LITTLE.split(), "--seed", SEED, "--share", options.share])
    keep({"compiled": options.share})


def _sizes(options: argparse.Namespace) -> list[str]:
    """Return the sizes of all operations. Blocks are those of engines, for which kernels are compiled already."""
    if options.device == STAND_IN:
        return TINY.split()
    from benchmarks.engine.gpu import BLOCK_SIZE

    sizes = f"--rows 1 16 64 256 --context 1024 --chunk 512 8192 --block-size {BLOCK_SIZE} --runs 10 {COPY}"
    return sizes.split()


def engine(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Benchmark an engine; the benchmark's document is the result."""
    from benchmarks.engine import gpu

    model, sizes = options.model, ["--steps", "20", *COPY.split()]
    if options.device == STAND_IN:
        from tests.support.gpu_stand_in import THERE, tiny_shape

        gpu.CudaDevice, gpu.BALLAST_BYTES = lambda: THERE, 4  # type: ignore[assignment,misc]
        gpu.MAX_MODEL_LEN = 256
        model = str(tiny_shape(model, vocab_size=272))
        sizes = ["--short", "--steps", "2", "--copy-mib", "1", "--matrix", "32"]
    if options.batch_invariant:
        sizes.append("--batch-invariant")
    gpu.main(["--model", model, "--loads", *options.loads, *sizes, "--seed", SEED, "--out", str(options.result)])
