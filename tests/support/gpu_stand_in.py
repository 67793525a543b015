"""Owns a run without a GPU of what is meant for one: `-p tests.support.gpu_stand_in`, or an import before all else.
Shapes are tiny, FlashAttention is a stand-in, and there is no Triton. Never loaded by any other run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakSet

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
_held = WeakSet[object]()
"""What takes memory of the other ranks' devices."""


class Held:
    def __init__(self, rank: int, share: float) -> None:
        assert rank, "the leader's device has what it has"
        self.mebibytes = share * MEBIBYTES[1]
        _held.add(self)


def launch_ranks(gpus: Sequence[str]) -> StandInLauncher:
    taken = sum(one.mebibytes for one in _held if isinstance(one, Held))
    return StandInLauncher(mebibytes=(MEBIBYTES[0] - taken, MEBIBYTES[1]))


def choose_device(config: EngineConfig) -> tuple[Device, str]:
    return (THERE if config.device == "cuda" else HostDevice()), "a stand-in"


engine.execution.device.choose_device = engine.build.executor.choose_device = choose_device
engine.build.gpu_ranks.SubprocessLauncher = launch_ranks  # type: ignore[assignment,misc]


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
        if hasattr(module, "hold_memory"):
            module.hold_memory = Held  # type: ignore[union-attr]
        if hasattr(module, "CANCELS"):
            module.CANCELS = int(os.environ.get("STAND_IN_CANCELS", module.CANCELS))  # type: ignore[union-attr]
