"""Owns a run of tests/gpu without a GPU: `-p tests.support.gpu_stand_in`. Shapes are tiny, FlashAttention is a
stand-in, and there is no Triton. Never loaded by any other run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import engine.build.executor
import engine.execution.device
from engine.config import EngineConfig
from engine.execution.device import Device, HostDevice
from tests.support.fake_device import FakeDevice
from tests.support.fake_flash import FakeFlash

sys.modules["triton"] = None  # type: ignore[assignment]
sys.modules["vllm_flash_attn"] = FakeFlash()  # type: ignore[assignment]
torch.cuda.is_available = lambda: True
THERE = FakeDevice(free=(8000,), total=10_000)


def choose_device(config: EngineConfig) -> tuple[Device, str]:
    return (THERE if config.device == "cuda" else HostDevice()), "a stand-in"


engine.execution.device.choose_device = engine.build.executor.choose_device = choose_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace every model that is asked for by one layer of the shape's own architecture and vocabulary."""
    directory = Path(os.environ["STAND_IN_SHAPES"])
    for module in {getattr(item, "module", None) for item in items}:
        if (shapes := getattr(module, "SHAPES", None)) and isinstance(shapes, Path):
            config = json.loads((shapes / "qwen3-0.6b" / "config.json").read_text())
            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
            (directory / "qwen3-0.6b").mkdir()
            (directory / "qwen3-0.6b" / "config.json").write_text(json.dumps(config | sizes | heads))
            module.SHAPES = directory  # type: ignore[union-attr]
