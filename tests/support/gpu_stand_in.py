"""Owns a run without a GPU of what is meant for one: `-p tests.support.gpu_stand_in`, or an import before all else.
Shapes are tiny, FlashAttention is a stand-in, and there is no Triton. Never loaded by any other run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import engine.build.executor
import engine.build.gpu_ranks
import engine.execution.device
import engine.models
from engine.config import EngineConfig
from engine.execution.device import Device, HostDevice
from tests.support.fake_device import FakeDevice
from tests.support.fake_flash import FakeFlash
from tests.support.gpu_rank_process import StandInLauncher

if os.environ.get("STAND_IN_TRITON") != "1":  # then its interpreter runs the kernels
    sys.modules["triton"] = None  # type: ignore[assignment]
sys.modules["vllm_flash_attn"] = FakeFlash()  # type: ignore[assignment]
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
SHAPES = Path(engine.models.__file__).parent / "shapes"
_scratch = TemporaryDirectory(prefix="stand-in-")


class StandIn(FakeDevice):
    """Which is always still at work when it is asked."""

    def timing_event(self) -> StandInEvent:
        return StandInEvent()


class StandInEvent:
    is_past = False

    def __init__(self) -> None:
        self._s = time.perf_counter()

    def ms_until(self, later: StandInEvent) -> float:
        return (later._s - self._s) * 1000


MEBIBYTES = (8000, 10_000)
THERE = StandIn(free=MEBIBYTES[:1], total=MEBIBYTES[1])


def choose_device(config: EngineConfig) -> tuple[Device, str]:
    return (THERE if config.device == "cuda" else HostDevice()), "a stand-in"


engine.execution.device.choose_device = engine.build.executor.choose_device = choose_device
engine.build.gpu_ranks.SubprocessLauncher = lambda gpus: StandInLauncher(mebibytes=MEBIBYTES)  # type: ignore[assignment,misc]


def tiny_shape(name: str, **changes: int) -> Path:
    """A directory of that name: one layer of the shape's own line and vocabulary, or with the `changes`."""
    config = json.loads((SHAPES / name / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    directory = Path(os.environ.get("STAND_IN_SHAPES") or _scratch.name) / name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | sizes | heads | changes))
    return directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace every model that is asked for by one layer of the shape's own architecture and vocabulary."""
    for module in {getattr(item, "module", None) for item in items}:
        if isinstance(getattr(module, "SHAPES", None), Path):
            module.SHAPES = tiny_shape("qwen3-0.6b").parent  # type: ignore[union-attr]
        if hasattr(module, "CANCELS"):
            module.CANCELS = int(os.environ.get("STAND_IN_CANCELS", module.CANCELS))  # type: ignore[union-attr]
