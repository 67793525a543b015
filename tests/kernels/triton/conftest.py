"""Owns where the Triton kernels are tested.
Never asks for a GPU: the interpreter runs them on the CPU, on a GPU's machine, too, and tests/gpu/test_kernels.py gives
that device to the same cases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest


@pytest.fixture(autouse=True)
def _infinities_as_on_a_gpu() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of what a GPU computes without a word."""
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        yield


@pytest.fixture
def device() -> str:
    return "cpu"
