"""Owns the contract of an engine over several GPUs, on pretended ones: it answers as one GPU does, captured or not.
Never needs a GPU: gloo is in NCCL's place, and the followers are threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ConfigError
from engine.execution.gpu.executor import DeviceExecutor
from engine.step import PENDING_TOKEN, ExecutorFatalError, GraphUse, PromptScoring, StepPlan
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import GpuRanks, gpu_ranks, pretend_gpus
from tests.support.plans import chunk, decode, forced_logits, greedy_text
from tests.support.tiny_models import VOCAB, save_model

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3, 11, 0), (1, 2, 4, 5)
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
CAPTURED: dict[str, Any] = {"cuda_graph_decode_rows": (2, 3), "cuda_graph_mixed_tokens": (24,)}
GRAPHS = [pytest.param({"cuda_graphs": "none"}, id="eager"), pytest.param(CAPTURED, id="captured")]


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


@pytest.fixture
def pair(model: Path) -> Iterator[GpuRanks]:
    with gpu_ranks(2, model, **CAPTURED) as made:
        yield made


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(("kind", "ranks"), [("llama", 2), ("gemma3", 2), ("qwen3", 4)])
def test_log_probabilities_and_greedy_text_are_those_of_one_gpu(
    kind: str, ranks: int, graphs: dict[str, Any], tmp_path: Path
) -> None:
    save_model(kind, tmp_path)
    found = []
    for size in (1, ranks):
        with gpu_ranks(size, tmp_path, **graphs) as made:
            logits = forced_logits(made.executor, TOKENS, BLOCKS, 16).log_softmax(-1)
            found.append((logits, greedy_text(made.executor, TOKENS[:20], OTHER_BLOCKS, 20, chunk_size=7)))
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    assert found[1][1] == found[0][1]
