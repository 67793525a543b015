"""The groups that tests of the contract run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kernels.collectives.shared_memory import new_directory
from tests.kernels.collectives.jobs import SLOT_BYTES, in_memory
from tests.support.ranks import MakeGroup

Make = Callable[..., MakeGroup]
"""From a timeout in seconds, where it matters, to what makes each rank's end of a new group."""


@pytest.fixture
def memory() -> Iterator[Make]:
    """Groups of shared memory, which leave nothing behind."""
    made: list[Path] = []

    def make(timeout_s: float = 30, slot_bytes: int = SLOT_BYTES) -> MakeGroup:
        made.append(new_directory())
        return partial(in_memory, made[-1], timeout_s, slot_bytes)

    yield make
    assert not [directory for directory in made if directory.exists()]
