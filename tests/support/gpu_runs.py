"""Owns which runs of pytest see the machine's GPU: only those of tests/gpu. All others run as on a machine without one.
Never asks torch, which is slow to import: a process shows Triton's
kernels either to its interpreter or to a compiler."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
DRIVER = Path("/dev/nvidiactl")
REQUIRED = "CHUNKSERVE_REQUIRE_GPU"
"""1: a run of tests/gpu ends at once unless a GPU runs compiled kernels."""
SHARD = "CHUNKSERVE_GPU_SHARD"
"""`2/16`: every sixteenth of the collected tests, from the third on. Processes side by side compile on all cores."""


def is_of_the_gpu(arguments: Iterable[str], where: Path) -> bool:
    """Return whether all arguments are of tests/gpu:
    files, folders and tests that pytest was given, relative to `where`."""
    paths = [(where / argument.partition("::")[0]).resolve() for argument in arguments]
    return bool(paths) and all(path.is_relative_to(GPU_TESTS) for path in paths)


def hide_gpu(environment: MutableMapping[str, str]) -> None:
    """Hide the GPU from this process and those that it starts, before torch or triton is imported."""
    environment["TRITON_INTERPRET"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""


def show_gpu(environment: MutableMapping[str, str]) -> None:
    """Each kernel has its first configuration: a thousand combinations of them would be timed for half an hour. The
    name is that of kernels.triton.shared.launch.TUNING. Kernels are interpreted only if the environment says so."""
    environment.setdefault("CHUNKSERVE_TRITON_TUNING", "0")


def shard_of(tests: Sequence[T], shard: str) -> Sequence[T]:
    """All where none is named."""
    if not shard:
        return tests
    number, count = map(int, shard.split("/"))
    return tests[number::count]
