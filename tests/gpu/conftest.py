"""Owns the one reason for which tests of the GPU are left out: there is none.
Never hides that one fails: what a GPU does wrong is a failure."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.device import Device, choose_device


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"no GPU: torch {torch.__version__} sees none (`make test-gpu` runs these alone)")
    return choose_device(EngineConfig(device="cuda"))[0]
