"""Owns a part's process: it announces what it runs on, does its work, and keeps each result as it comes.
Never runs on a CPU or in an interpreter unless a rehearsal was asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write_whole
from tests.gpu.hour.phases import CUDA, STAND_IN

WRONG_MODE = 2
Keep = Callable[[dict[str, Any]], None]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.hour.part",
        description="Run one part of tests/gpu/first_hour.py in this process, and write its result to a file.",
    )
    parser.add_argument("name")
    parser.add_argument("--device", choices=[CUDA, STAND_IN], required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--loads", nargs="+", default=[])
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--share", default="0/1")
    options = parser.parse_args(arguments)
    if options.device == STAND_IN:
        from tests.support import gpu_stand_in  # noqa: F401
    from tests.support.gpu_report import mode

    how = mode()
    print(f"### {options.name} ON {how['device'].upper()}, KERNELS {how['kernels'].upper()}: {how}", flush=True)
    if options.device == CUDA and (how["device"] == "none" or how["kernels"] != "compiled"):
        print(f"### a GPU with compiled kernels was asked for, and there is {how}", flush=True)
        sys.exit(WRONG_MODE)
    _work(options, how)


def _work(options: argparse.Namespace, how: dict[str, str]) -> None:
    from tests.gpu.hour import attention, benches, compiling, machine, profiling

    work: dict[str, Callable[[argparse.Namespace, Keep], None]] = {
        "machine": machine.describe,
        "memcheck": machine.memcheck,
        "precompile": compiling.precompile,
        "compile-one": compiling.compile_one,
        "tuning": compiling.tuning,
        "profile": profiling.profile,
        "attention": attention.sweep,
        "packages": attention.packages,
        "operations-ahead": benches.compile_operations,
        "operations": benches.operations,
    }
    # Engine benchmarks write a document of their own, which names its device.
    run = work.get(options.name, benches.engine)
    run(options, lambda found: write_whole(options.result, {"mode": how, **found}))


if __name__ == "__main__":
    main()
