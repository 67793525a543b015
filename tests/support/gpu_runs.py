"""Owns which runs of pytest see the machine's GPU: only those of tests/gpu. All others run as on a machine without one.
Never asks torch, which is slow to import: a process shows Triton's
kernels either to its interpreter or to a compiler."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
DRIVER = Path("/dev/nvidiactl")
REQUIRED = "CHUNKSERVE_REQUIRE_GPU"
"""1: a run of tests/gpu ends at once unless a GPU runs compiled kernels."""
SHARD = "CHUNKSERVE_GPU_SHARD"
"""`2/16`: every sixteenth group of the collected tests, from the third on. Processes side by side compile on all cores,
and the tests of a group launch the same compiled kernels."""
NEVER_COMPILED = {"step", "scale"}
"""Parameters of tests that change the rows or the numbers that kernels see, but not the kernels."""


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


def kernels_of(test: str, parameters: Mapping[str, Any]) -> Hashable:
    """Return what tests of one group have in common. test: its file and function.

    All windows are one: kernels know whether there is any.
    """
    known = {name: value for name, value in parameters.items() if name not in NEVER_COMPILED}
    if "window" in known:
        known["window"] = known["window"] is not None
    return test, *sorted((name, str(value)) for name, value in known.items())


def shard_of(tests: Sequence[T], shard: str, group: Callable[[T], Hashable] = id) -> Sequence[T]:
    """Return the tests of a shard's groups, or all where none is named: two processes would compile a kernel twice.

    Groups are numbered as they are first collected, so that expensive neighbours are apart.
    """
    if not shard:
        return tests
    number, count = map(int, shard.split("/"))
    places: dict[Hashable, int] = {}
    return [test for test in tests if places.setdefault(group(test), len(places)) % count == number]
