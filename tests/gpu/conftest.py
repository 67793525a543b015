"""Owns the only reason to skip GPU tests: there is no GPU.
Never hides a failure, nor what a test ran on: whatever a GPU does wrong fails, and the first lines name the device."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.execution import device as devices
from engine.execution.device import Device
from tests.support.gpu_report import PATH, GpuReport, mode
from tests.support.gpu_runs import REQUIRED, SHARD, is_of_the_gpu, kernels_of, shard_of


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report the device in runs of GPU tests alone; other runs must not import torch for a header."""
    if not is_of_the_gpu(config.args, config.invocation_params.dir):
        return
    how, path = mode(), os.environ.get(PATH)
    if os.environ.get(REQUIRED) == "1" and (how["device"] == "none" or how["kernels"] != "compiled"):
        pytest.exit(f"{REQUIRED} is 1, but the device is {how['device']}, with kernels {how['kernels']}", returncode=2)
    config.pluginmanager.register(GpuReport(how, Path(path) if path else None))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = shard_of(items, os.environ.get(SHARD, ""), group)


def group(test: pytest.Item) -> Hashable:
    callspec = getattr(test, "callspec", None)
    return kernels_of(test.nodeid.partition("[")[0], callspec.params if callspec else {})


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"no GPU: torch {torch.__version__} sees none (`make test-gpu` runs these alone)")
    return devices.choose_device(EngineConfig(device="cuda"))[0]
