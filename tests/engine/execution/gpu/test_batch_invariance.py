"""Owns the promise of `batch_invariant` on a device: tokens and log-probabilities are the same to the bit in any
schedule, and a start that finds otherwise is refused.
Never needs a GPU: Triton's interpreter runs the kernels, its products summed up in order, as tensor cores do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build.gpu import start_on_device
from engine.config import ConfigError, EngineConfig, SchedulerConfig, SpeculativeConfig
from engine.execution.gpu.executor import DeviceExecutor
from engine.protocol import SamplingParams
from kernels.choice import TRITON_TABLE
from kernels.forward import Linear
from tests.golden.bench import Bench
from tests.support.fake_device import FakeDevice, write_model
from tests.support.ordered_products import ordered_products

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from kernels.triton import ops

NEW_TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
LENGTHS = (3, 66, 15, 16)
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "num_kv_blocks": 40, "num_threads": 1, "max_num_seqs": 6,
    "max_num_batched_tokens": 90, "max_model_len": 100, "batch_invariant": True,
}  # fmt: skip
GRAPHS: dict[str, Any] = {
    "cuda_graphs": "all", "cuda_graph_decode_rows": (3, 6), "cuda_graph_mixed_tokens": (24, 90),
    "cuda_graph_mixed_rows": (6,),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
    with ordered_products():
        yield


def make(directory: Path, model: dict[str, Any] | None = None, **settings: Any) -> Bench:
    write_model(directory, **{"num_hidden_layers": 1} | (model or {}))
    executor, resolved = start_on_device(directory, EngineConfig(**SETTINGS | settings), FakeDevice(), "a test").build()
    assert isinstance(executor, DeviceExecutor)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]
    return Bench(executor, resolved, prompts)


Answers = tuple[list[list[int]], list[list[float]]]


def alone(bench: Bench, params: SamplingParams) -> Answers:
    """Return texts and log-probabilities of each prompt by itself, unchunked, without a prefix cache."""
    texts, logprobs = [], []
    for prompt in bench.prompts:
        texts += bench.serve([prompt], params, enable_prefix_caching=False)
        logprobs += bench.logprobs
    return texts, logprobs


def together(bench: Bench, params: SamplingParams, **settings: Any) -> Answers:
    return bench.serve(bench.prompts, params, **settings), bench.logprobs


@pytest.mark.slow
def test_bits_are_the_same_in_any_batch_for_every_budget_from_the_cache_and_after_a_preemption(tmp_path: Path) -> None:
    bench = make(tmp_path, **GRAPHS)
    want = alone(bench, GREEDY)
    budget = {"max_num_batched_tokens": 23, "max_prefill_tokens": 23}
    assert together(bench, GREEDY, enable_prefix_caching=False) == want
    assert together(bench, GREEDY, rounds=2, **budget) == want  # from the prefix cache
    few = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)
    assert together(bench, GREEDY, scheduler=few, enable_prefix_caching=False, num_kv_blocks=7) == want
    assert bench.preemptions > 0
    bench.executor.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({"sliding_window": 9, "architectures": ["MistralForCausalLM"]}, {"dtype": "float16"}),
        (
            {},
            {
                "dtype": "float32",
                "kv_cache_dtype": "int8",
                "quantize": "int8",
                "num_speculative_tokens": 3,
                "speculative": SpeculativeConfig(method="ngram"),
            },
        ),
    ],
    ids=["windows in float16", "8 bits and drafts"],
)
def test_sampled_bits_are_the_same_in_any_batch_with_other_features(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any]
) -> None:
    bench = make(tmp_path, model, **GRAPHS, **settings)
    want = alone(bench, SAMPLED)
    assert together(bench, SAMPLED, enable_prefix_caching=False) == want
    assert together(bench, SAMPLED, rounds=2, max_num_batched_tokens=23, max_prefill_tokens=23) == want
    bench.executor.shutdown()


def test_a_start_compares_steps_and_a_short_prompt_has_the_same_bits_beside_another(tmp_path: Path) -> None:
    bench = make(tmp_path, cuda_graphs="none", max_model_len=36, max_num_seqs=3)
    bench.prompts = bench.prompts[:1] + bench.prompts[2:3]
    want = alone(bench, SAMPLED)
    assert together(bench, SAMPLED, enable_prefix_caching=False) == want
    bench.executor.shutdown()


def test_a_device_whose_products_depend_on_the_batch_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_rows(x: Tensor, linear: Linear) -> Tensor:
        return ops.invariant_linear(x, linear) * (1 + 0.01 * (len(x) > 20))

    monkeypatch.setattr(ops, "BATCH_INVARIANT", replace(ops.BATCH_INVARIANT, linear=by_rows))
    with pytest.raises(ConfigError, match=r"^batch_invariant is true, but on fake GPU the logits after \d+ tokens .*"):
        make(tmp_path, cuda_graphs="none", max_model_len=40, max_num_seqs=2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attention": "torch"}, "batch_invariant is true, but attention is torch: on a GPU, only the Triton kernels"),
        (
            {"tensor_parallel_size": 2},
            "batch_invariant is true, but tensor_parallel_size is 2 and this engine .*: on several GPUs, the ",
        ),
        ({"activations": "fp8"}, "batch_invariant is true, but activations is fp8: activations are rounded only in"),
    ],
)
def test_what_does_not_keep_bits_is_refused_beside_batch_invariance(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make(tmp_path, **settings)
