"""Owns compilation before everything else, on all cores, and the record of what autotuning chose.
Never keeps a choice where an engine would find it: choices are returned as data."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.gpu.hour.engines import started
from tests.gpu.hour.phases import LARGE, SMALL, STAND_IN

CONFIGURATIONS = 10
"""The most configurations of any kernel."""
BATCH_INVARIANT = "batch-invariant"
EXPERTS = "qwen3-30b-a3b"
Keep = Callable[[dict[str, Any]], None]


def precompile(options: argparse.Namespace, keep: Keep) -> None:
    """Compile each configuration in a process that starts engines whose kernels have only that one, so that later parts
    find everything compiled. Where one does not fit the device, the kernel takes the next. Batch-invariant kernels have
    one configuration, and a process of their own."""
    tunings = range(1 if options.device == STAND_IN else CONFIGURATIONS)
    runs = {str(tuning): (str(tuning), list[str]()) for tuning in tunings}
    if options.device != STAND_IN:
        runs[BATCH_INVARIANT] = "0", ["--batch-invariant"]
    found: dict[str, str] = {}

    def one(name: str) -> str:
        tuning, more = runs[name]
        command = [sys.executable, "-m", "tests.gpu.hour.part", "compile-one", "--device", options.device]
        done = subprocess.run(
            [*command, "--result", f"{options.result}.{name}", *more],
            env=os.environ | {"CHUNKSERVE_TRITON_TUNING": tuning},
            capture_output=True,
            text=True,
            check=False,
        )
        return "compiled" if done.returncode == 0 else done.stderr.strip()[-300:] or f"status {done.returncode}"

    with ThreadPoolExecutor(min(len(runs), os.cpu_count() or 1)) as pool:
        for name, said in zip(runs, pool.map(one, runs), strict=True):
            found[name] = said
            keep({"configurations": found})
    print(found, flush=True)
    if "compiled" not in found.values():
        sys.exit(1)


def compile_one(options: argparse.Namespace, keep: Keep) -> None:
    """Start engines with one layer each; a start runs every kernel. The stand-in has no attention over 8 bits, and no
    kernels of experts."""
    wide: dict[str, Any] = {}
    narrow = [{"kv_cache_dtype": name} for name in ("int8", "fp8_e4m3")]
    engines = [(LARGE, wide), (SMALL, wide)]
    if options.device != STAND_IN:
        engines += [*((LARGE, each) for each in narrow), (EXPERTS, wide)]
    if options.batch_invariant:
        engines = [(LARGE, {"batch_invariant": True})]
    for shape, more in engines:
        small = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "num_kv_blocks": 2048}
        with started(options.device, shape, layers=1, cuda_graphs="none", **small, **more):
            keep({"shape": shape, **more})


def tuning(options: argparse.Namespace, keep: Keep) -> None:
    """Keep what each kernel chose when an engine started, and the time of each configuration."""
    choices: list[dict[str, Any]] = []
    missing = _record(choices)
    for shape in (LARGE, SMALL) if options.device == STAND_IN else (LARGE, SMALL, EXPERTS):
        begun = len(choices)
        with started(options.device, shape, layers=1, max_num_seqs=64, max_num_batched_tokens=8192, cuda_graphs="none"):
            for choice in choices[begun:]:
                choice["shape"] = shape
        keep({"choices": choices, **({"missing": missing} if missing else {})})
    print(f"{len(choices)} choices", flush=True)


def _record(choices: list[dict[str, Any]]) -> str:
    """Record choices from here on. Return why none can be recorded, or an empty string."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError as error:
        return f"no Triton: {error}"
    run = Autotuner.run

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        known = set(self.cache)
        out = run(self, *args, **options)
        for key in set(self.cache) - known:
            times = {str(config): found for config, found in getattr(self, "configs_timings", {}).items()}
            name = getattr(self.base_fn, "__name__", str(self.base_fn))
            choices.append({"kernel": name, "key": str(key), "chosen": str(self.cache[key]), "ms": times})
        return out

    Autotuner.run = recorded
    return ""
