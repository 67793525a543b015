"""Owns the device on which the Triton kernels are tested.
Never asks for a GPU: the interpreter runs them on the CPU, even on a machine with a GPU; tests/gpu/test_kernels.py runs
the same cases on the GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from tests.support.seeds import derived_seed
from tests.support.shuffled_programs import shuffled_programs


@pytest.fixture(autouse=True)
def _infinities_as_on_a_gpu() -> Iterator[None]:
    """Silence NumPy, with which the interpreter computes: it warns of what a GPU computes silently."""
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        yield


@pytest.fixture(autouse=True)
def _programs_in_any_order(request: pytest.FixtureRequest) -> Iterator[None]:
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    with shuffled_programs(random.Random(derived_seed("programs", request.node.nodeid))):
        yield


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the compiler keeps its kernels, for all workers of this run: several tests ask for the
    same, and each takes a second."""
    here = tmp_path_factory.getbasetemp()
    return (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "compiled"
