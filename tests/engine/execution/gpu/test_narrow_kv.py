"""Owns the KV cache in 8 bits of an engine on a GPU: its memory, its results beside a CPU's, and texts.
Never needs a GPU: Triton's interpreter runs the kernels, and captures are made on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.config import EngineConfig, ResolvedConfig, SchedulerConfig
from engine.execution.gpu.executor import DeviceExecutor
from engine.protocol import SamplingParams
from engine.step import GraphUse, StepPlan
from kernels.choice import TRITON_TABLE
from tests.golden.bench import Bench
from tests.support.fake_device import FakeDevice, write_model
from tests.support.plans import chunk, decode, forced_logits

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

KINDS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
ONE_FAST = ["fp8_e4m3", pytest.param("int8", marks=pytest.mark.slow)]  # the interpreter takes its time
CHANGE = {"int8": 0.02, "fp8_e4m3": 0.1}
"""Nats by which a log-probability may change in the mean. The weights are random, and so are near ties."""
GENERATOR = torch.Generator().manual_seed(5)
TOKENS = torch.randint(0, 256, (20,), generator=GENERATOR).tolist()
PROMPTS = [torch.randint(0, 256, (length,), generator=GENERATOR).tolist() for length in (15, 33, 14)]
BLOCKS, OTHER_BLOCKS = (9, 3), (1, 2)
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "num_kv_blocks": 16, "num_threads": 1}
LIMITS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 12}
NUM_BYTES = 2 * 16 * 2 * (16 + 4)
"""K and V of a block of 16 tokens in one layer: two KV heads of 16 numbers, and their scales."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose queries and keys are normalised by head, in the launch that writes them to the cache."""
    directory = tmp_path_factory.mktemp("model")
    return write_model(directory, architectures=["Qwen3ForCausalLM"], num_hidden_layers=1)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)


def start(
    model: Path, kept_in: str, device: FakeDevice | None = None, **settings: Any
) -> tuple[DeviceExecutor, ResolvedConfig]:
    config = EngineConfig(**SETTINGS | LIMITS | {"kv_cache_dtype": kept_in, "cuda_graphs": "none"} | settings)
    return start_on_device(model, config, device or FakeDevice(), "a test").build()


@pytest.fixture
def captured(model: Path) -> Iterator[DeviceExecutor]:
    sizes = {"cuda_graph_decode_rows": (3,), "cuda_graph_mixed_tokens": (12,), "cuda_graph_mixed_rows": (3,)}
    executor, _ = start(model, "fp8_e4m3", cuda_graphs="all", **sizes)
    yield executor
    executor.shutdown()


def poison(executor: DeviceExecutor) -> None:
    """Fill K and V with what no row may read: every scale is NaN."""
    for tensors in executor.model.cache.layers:
        for tensor in tensors:
            tensor.view(torch.int8).fill_(-1)


def on_cpu(model: Path, **settings: Any) -> torch.Tensor:
    config = EngineConfig(device="cpu", kernels="torch_cpu", **SETTINGS, **settings)
    return forced_logits(create_executor(model, config)[0], TOKENS, BLOCKS)


@pytest.mark.parametrize("kept_in", ONE_FAST)
def test_logits_are_those_of_the_cpus_kernels_and_near_those_of_the_wide_cache(model: Path, kept_in: str) -> None:
    """A few keys and values lie halfway between two numbers, and may be rounded to either."""
    executor, resolved = start(model, kept_in)
    assert resolved.kernels == executor.model.ops.name == "triton"
    assert {tensor.dtype for layer in executor.model.cache.layers for tensor in layer} == {KINDS[kept_in]}
    poison(executor)
    got = forced_logits(executor, TOKENS, BLOCKS, 7)
    executor.shutdown()
    narrow, wide = on_cpu(model, kv_cache_dtype=kept_in), on_cpu(model)
    torch.testing.assert_close(got, narrow, atol=2e-3, rtol=1e-3)
    off = (got.log_softmax(-1) - wide.log_softmax(-1)).abs().mean()
    assert 0 < off < CHANGE[kept_in]
    assert (got - narrow).abs().mean() < (got - wide).abs().mean() / 10, (
        "the change is the cache's, and not the kernels'"
    )


def test_captured_steps_with_padding_give_what_plain_ones_give(model: Path, captured: DeviceExecutor) -> None:
    plain, _ = start(model, "fp8_e4m3")
    steps = {
        "decode 3": (decode("a", TOKENS[17], 17, BLOCKS), decode("b", TOKENS[4], 4, OTHER_BLOCKS)),
        "mixed 12x3": (decode("a", TOKENS[18], 18, BLOCKS), chunk("b", TOKENS, 5, 12, OTHER_BLOCKS)),
    }
    found: dict[str, list[torch.Tensor]] = {size: [] for size in steps}
    for executor in (captured, plain):
        poison(executor)
        forced_logits(executor, TOKENS[:17], BLOCKS, 12)
        forced_logits(executor, TOKENS[:4], OTHER_BLOCKS)
        for size, rows in steps.items():
            plan = StepPlan(0, rows)
            found[size].append(executor.logits(plan).clone())
            executor.launch(plan)  # the same tokens, into the same slots
            assert executor.collect().graph == (GraphUse(True, size) if executor is captured else None)
    plain.shutdown()
    for one, other in found.values():
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kept_in", ONE_FAST)
def test_the_memory_that_is_left_holds_blocks_of_their_own_size(model: Path, kept_in: str) -> None:
    """Numbers and scales are counted, and nothing else is allocated for a block."""
    config = EngineConfig(**SETTINGS | LIMITS | {"kv_cache_dtype": kept_in, "num_kv_blocks": None})
    started = start_on_device(model, config, FakeDevice(), "a test")
    assert (
        started.resolved.reasons["kv_cache_dtype"] == "asked for; 1280 bytes a block, scales included, instead of 4096"
    )
    executor, resolved = start(model, kept_in, num_kv_blocks=None, kv_cache_memory_gib=100 * NUM_BYTES / 2**30)
    assert resolved.num_kv_blocks == 100
    assert f"at {NUM_BYTES} bytes a block" in resolved.reasons["num_kv_blocks"]
    held = sum(tensor.numel() * tensor.itemsize for layer in executor.model.cache.layers for tensor in layer)
    assert held == 100 * NUM_BYTES
    executor.shutdown()


@pytest.mark.slow
def test_texts_are_the_same_alone_together_from_the_prefix_cache_and_after_a_preemption(model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    executor, resolved = start(model, "fp8_e4m3", max_num_batched_tokens=40)
    bench = Bench(executor, resolved, PROMPTS)
    alone = [bench.serve([prompt], params)[0] for prompt in PROMPTS]
    assert bench.serve(PROMPTS, params, rounds=2, max_num_batched_tokens=17) == alone
    assert bench.cached["1"] >= 32
    rest = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    resumed = bench.serve([[*PROMPTS[0], *alone[0][:2]]], rest, num_answer_tokens=2)[0]
    assert resumed == alone[0][2:], "a migrated request goes on"
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy="retract", watermark_blocks=0)
    blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    tight = bench.serve(PROMPTS, params, num_kv_blocks=blocks, scheduler=policy, enable_prefix_caching=False)
    executor.shutdown()
    assert bench.preemptions > 0
    assert tight == alone
