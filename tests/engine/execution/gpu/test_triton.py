"""Owns Triton's attention as the engine calls it on a device: steps captured, padded and plain, compared with the
reference.
Never needs a GPU: Triton's interpreter runs the kernels, and captures are made on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.config import EngineConfig
from engine.execution.gpu.executor import DeviceExecutor
from engine.step import GraphUse, ScheduledRequest, StepPlan
from kernels.choice import TRITON_TABLE
from tests.support.fake_device import FakeDevice, write_model
from tests.support.plans import chunk, decode, forced_logits

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

TOKENS = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS, OTHER_BLOCKS = (9, 3), (1, 2)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 12, "num_threads": 1}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose queries and keys are normalised by head, in the launch that writes them to the cache."""
    directory = tmp_path_factory.mktemp("model")
    return write_model(directory, architectures=["Qwen3ForCausalLM"], num_hidden_layers=1)


@pytest.fixture(scope="module")
def want(model: Path) -> torch.Tensor:
    """Return the reference's logits of TOKENS. # [len(TOKENS), vocab]"""
    executor = create_executor(model, EngineConfig(device="cpu", kernels="reference", **SETTINGS))[0]
    return forced_logits(executor, TOKENS, BLOCKS)


@pytest.fixture(scope="module")
def executors(model: Path) -> Iterator[dict[str, DeviceExecutor]]:
    """Make two executors: one captures sizes larger than any step below has, the other captures none."""
    sizes: dict[str, Any] = {"cuda_graph_decode_rows": (3,), "cuda_graph_mixed_tokens": (12,)}
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
        for name, graphs in {
            "captured": {"cuda_graphs": "all", "cuda_graph_mixed_rows": (3,), **sizes},
            "plain": {"cuda_graphs": "none"},
        }.items():
            limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "attention": "triton"}
            config = EngineConfig(**SETTINGS | limits | graphs)
            made[name], resolved = start_on_device(model, config, FakeDevice(), "a test").build()
            assert resolved.kernels == made[name].model.ops.name == "triton"
    yield made
    for executor in made.values():
        executor.shutdown()


@torch.inference_mode()
def poison(executor: DeviceExecutor) -> None:
    """Fill what no row owns with NaN: KV blocks, the block of padding, and what earlier steps left."""
    executor.model._hidden.fill_(torch.nan)
    for tensors in executor.model.cache.layers:
        for tensor in tensors:
            tensor.fill_(torch.nan)


def logits(executor: DeviceExecutor, *rows: ScheduledRequest) -> tuple[torch.Tensor, GraphUse | None]:
    """Return the logits at each of the step's tokens, and how it ran."""
    plan = StepPlan(0, rows)
    found = executor.logits(plan).clone()
    executor.launch(plan)  # the same tokens, into the same slots
    return found, executor.collect().graph


@pytest.mark.slow
def test_chunks_by_triton_captured_with_padding_or_plain_give_the_logits_of_the_reference(
    executors: dict[str, DeviceExecutor], want: torch.Tensor
) -> None:
    for executor in executors.values():
        poison(executor)
        torch.testing.assert_close(forced_logits(executor, TOKENS, BLOCKS, 7), want, **CLOSE)


def test_decode_and_mixed_steps_by_triton_captured_with_padding_or_plain_give_the_logits_of_the_reference(
    executors: dict[str, DeviceExecutor], want: torch.Tensor
) -> None:
    """Contexts are within a block and longer than one. Each captured step has a row of padding;
    mixed ones have tokens of padding, too."""
    steps = {
        "decode 3": (decode("a", TOKENS[17], 17, BLOCKS), decode("b", TOKENS[4], 4, OTHER_BLOCKS)),
        "mixed 12x3": (decode("a", TOKENS[18], 18, BLOCKS), chunk("b", TOKENS, 5, 12, OTHER_BLOCKS)),
    }
    positions = {"decode 3": [17, 4], "mixed 12x3": [18, *range(5, 12)]}
    for name, executor in executors.items():
        poison(executor)
        forced_logits(executor, TOKENS[:17], BLOCKS, 12)
        forced_logits(executor, TOKENS[:4], OTHER_BLOCKS)
        for size, rows in steps.items():
            got, graph = logits(executor, *rows)
            torch.testing.assert_close(got, want[positions[size]], **CLOSE)
            assert graph == (GraphUse(True, size) if name == "captured" else None)


@pytest.mark.slow
def test_float16_by_triton_gives_the_logits_of_the_reference_to_its_own_digits(
    model: Path, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 12, "attention": "triton"}
    config = EngineConfig(**SETTINGS | limits | {"dtype": "float16", "cuda_graphs": "none"})
    executor, resolved = start_on_device(model, config, FakeDevice(), "a test").build()
    assert (resolved.dtype, executor.model.cache.layers[0][0].dtype) == ("float16", torch.float16)
    got = forced_logits(executor, TOKENS, BLOCKS, 7)
    executor.shutdown()
    assert not torch.equal(got, want)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)
