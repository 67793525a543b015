"""The groups that tests of the contract run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kernels.collectives.shared_memory import new_directory
from kernels.cpu.native.library import load_library
from loadtest.server import free_port
from tests.kernels.collectives.jobs import SLOT_BYTES, Devices, in_memory, over_tcp
from tests.support.compiler import needs_compiler
from tests.support.ranks import MakeGroup

Make = Callable[..., MakeGroup]
"""From a timeout in seconds, where it matters, to what makes each rank's end of a new group."""


@pytest.fixture
def memory() -> Iterator[Make]:
    """Groups of shared memory, which leave nothing behind."""
    load_library()  # or ranks would compile it while the test waits for them
    made: list[Path] = []

    def make(timeout_s: float = 30, slot_bytes: int = SLOT_BYTES) -> MakeGroup:
        made.append(new_directory())
        return partial(in_memory, made[-1], timeout_s, slot_bytes)

    yield make
    assert not [directory for directory in made if directory.exists()]


def _gloo(timeout_s: float = 30) -> MakeGroup:
    return partial(over_tcp, f"127.0.0.1:{free_port()}", timeout_s)


def _devices(timeout_s: float = 30) -> MakeGroup:
    return Devices(f"127.0.0.1:{free_port()}", timeout_s)


ON_CPUS = [pytest.param("memory", marks=needs_compiler), "gloo"]


@pytest.fixture(params=[*ON_CPUS, "devices"])
def group(request: pytest.FixtureRequest) -> Make:
    """Groups of each kind."""
    return _made(request)


@pytest.fixture(params=ON_CPUS)
def exact_group(request: pytest.FixtureRequest) -> Make:
    """Groups that add in the order of ranks, and know which rank does not arrive."""
    return _made(request)


def _made(request: pytest.FixtureRequest) -> Make:
    simple = {"gloo": _gloo, "devices": _devices}
    made: Make = simple.get(request.param) or request.getfixturevalue("memory")
    return made
