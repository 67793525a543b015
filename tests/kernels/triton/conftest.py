"""Owns the device on which the Triton kernels are tested.
Never asks for a GPU: the interpreter runs them on the CPU, even on a machine with a GPU; tests/gpu/test_kernels.py runs
the same cases on the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator

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
