"""Owns the only reason to skip tests of the GPU: the machine has none.
Never hides a failing GPU: what it computes wrong is a failure."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.execution.device import Device, choose_device


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"no GPU: torch {torch.__version__} sees none (`make test-gpu` runs these alone)")
    return choose_device(EngineConfig(device="cuda"))[0]
