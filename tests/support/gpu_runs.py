"""Owns which runs of pytest see the machine's GPU: only those of tests/gpu. All others run as on a machine without one.
Never asks torch, which is slow to import: a process shows Triton's
kernels either to its interpreter or to a compiler."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from pathlib import Path

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
DRIVER = Path("/dev/nvidiactl")


def is_of_the_gpu(arguments: Iterable[str], where: Path) -> bool:
    """Return whether all arguments are of tests/gpu:
    files, folders and tests that pytest was given, relative to `where`."""
    paths = [(where / argument.partition("::")[0]).resolve() for argument in arguments]
    return bool(paths) and all(path.is_relative_to(GPU_TESTS) for path in paths)


def hide_gpu(environment: MutableMapping[str, str]) -> None:
    """Hide the GPU from this process and those that it starts, before torch or triton is imported."""
    environment["TRITON_INTERPRET"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
