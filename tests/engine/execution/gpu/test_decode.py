"""Owns that decode steps in every captured size give the logits of plain ones, for tokens that the test chooses.
Never needs a GPU: captures are made on the CPU, where a replay does the captured work again on the same tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.gpu import start_on_device
from engine.config import EngineConfig
from engine.execution.gpu.executor import DeviceExecutor
from engine.step import GraphUse
from tests.support.fake_device import FakeDevice, write_model
from tests.support.fake_flash import FakeFlash
from tests.support.plans import forced_steps

TOKENS = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(5)).tolist()
BEGINS = (1, 15, 16, 17, 31, 48)
"""The length of each prompt: the first decode rows are at the edges of blocks."""


def make(model: Path, **options: Any) -> DeviceExecutor:
    engine = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 30, "num_threads": 1}
    config = EngineConfig(**engine | {"max_num_seqs": 6, "max_num_batched_tokens": 96} | options)
    return start_on_device(model, config, FakeDevice(), "a test").build()[0]


def test_decode_rows_of_known_tokens_have_the_same_logits_in_every_captured_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end one after another, so that other sizes take over. Memory that no row owns is NaN."""
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", FakeFlash(any_dtype=True))  # type: ignore[arg-type]
    monkeypatch.setattr("kernels.flash.packages.DTYPES", (torch.float32,))
    model = write_model(tmp_path)
    sequences = [TOKENS[number : number + begin + number + 1] for number, begin in enumerate(BEGINS)]
    tables = [tuple(range(number, 30, 6)) for number in range(6)]
    captured, plain = make(model), make(model, cuda_graphs="none")
    with torch.inference_mode():
        captured.model._hidden.fill_(torch.nan)
        for tensor in (tensor for layer in captured.model.cache.layers for tensor in layer):
            tensor.fill_(torch.nan)
    found = forced_steps(captured, sequences, tables, BEGINS)
    uses = ["mixed 64x6"] * 6 + [f"decode {rows}" for rows in (6, 6, 4, 4, 2, 1)]
    assert [use for _, use in found] == [GraphUse(True, name) for name in uses]
    for (got, _), (want, none) in zip(found, forced_steps(plain, sequences, tables, BEGINS), strict=True):
        assert none is None
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
