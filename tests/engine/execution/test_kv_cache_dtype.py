"""Owns the KV cache in fewer bits: its memory, its refusals, and texts that depend on the request alone.
Never judges how accurate it is: the golden gate does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.engine import build_engine
from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.execution.executor import TorchExecutor
from engine.protocol import SamplingParams
from tests.golden.bench import Bench
from tests.support.compiler import needs_compiler
from tests.support.plans import forced_logits
from tests.support.tiny_models import VOCAB, save_model

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
GENERATOR = torch.Generator().manual_seed(4)
PROMPTS = [torch.randint(0, VOCAB, (length,), generator=GENERATOR).tolist() for length in (5, 16, 33, 70)]
KINDS = ["int8", "fp8_e4m3"]


def settings(**more: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "num_kv_blocks": 40, "num_threads": 1, **more})


WAYS = [
    ("int8", "torch_cpu"),
    ("fp8_e4m3", "torch_cpu"),
    pytest.param(("int8", "native"), marks=needs_compiler),
    pytest.param(("fp8_e4m3", "native"), marks=needs_compiler),
]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    kept_in, kernels = request.param
    directory = tmp_path_factory.mktemp("model")
    save_model("llama", directory)
    return Bench(*create_executor(directory, settings(kv_cache_dtype=kept_in, kernels=kernels)), PROMPTS)


def test_texts_are_the_same_alone_together_in_chunks_and_from_the_prefix_cache(bench: Bench) -> None:
    alone = [bench.serve([prompt], GREEDY)[0] for prompt in PROMPTS]
    for budget in (8, 17, 512):
        limits = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, "max_num_seqs": 4}
        assert bench.serve(PROMPTS, GREEDY, rounds=2, **limits) == alone
    assert bench.cached["3"] >= 64


def test_texts_are_the_same_after_a_preemption_and_after_a_migration(bench: Bench) -> None:
    alone = [bench.serve([prompt], GREEDY)[0] for prompt in PROMPTS]
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy="retract", watermark_blocks=0)
    blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    assert bench.serve(PROMPTS, GREEDY, num_kv_blocks=blocks, scheduler=policy, enable_prefix_caching=False) == alone
    assert bench.preemptions > 0
    rest = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS - 5, ignore_eos=True)
    resumed = [
        bench.serve([[*prompt, *text[:5]]], rest, num_answer_tokens=5)[0]
        for prompt, text in zip(PROMPTS, alone, strict=True)
    ]
    assert resumed == [text[5:] for text in alone]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_keys_and_values_are_in_fewer_bits_and_change_logits_by_little(way: tuple[str, str], tmp_path: Path) -> None:
    """The change is small, but not zero: the option has an effect."""
    kept_in, kernels = way
    save_model("llama", tmp_path)

    def logits(**more: Any) -> torch.Tensor:
        executor, _ = create_executor(tmp_path, settings(kernels=kernels, **more))
        return forced_logits(executor, PROMPTS[3], range(8), 16)

    off = (logits(kv_cache_dtype=kept_in).log_softmax(-1) - logits().log_softmax(-1)).abs()
    assert 0 < off.mean() < (0.05 if kept_in == "int8" else 0.3)


def cache_of(executor: TorchExecutor) -> list[torch.Tensor]:
    return [tensor for layer in executor.model.cache.layers for tensor in layer]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept_in", KINDS)
def test_memory_holds_as_many_blocks_as_their_bytes_say(kept_in: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = settings(kv_cache_dtype=kept_in, num_kv_blocks=None, kv_cache_memory_gib=1 / 1024)
    executor, resolved = create_executor(tmp_path, config)
    taken = sum(tensor.numel() * tensor.element_size() for tensor in cache_of(executor))
    assert taken <= 2**20 < taken + taken // resolved.num_kv_blocks
    assert taken // resolved.num_kv_blocks == 2 * 3 * 16 * 2 * (16 + 4)
    assert resolved.reasons["kv_cache_dtype"] == "asked for; 3840 bytes a block, scales included, instead of 12288"
    assert resolved.kv_cache_dtype == kept_in


@pytest.mark.parametrize("kept_in", KINDS)
@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_compiler), "torch_cpu"])
def test_a_model_with_recurrent_state_and_one_with_experts_keep_theirs_in_fewer_bits_too(
    kernels: str, kept_in: str, tmp_path: Path
) -> None:
    for kind in ("qwen3_next", "qwen3_moe"):
        save_model(kind, tmp_path / kind)
        executor, _ = create_executor(tmp_path / kind, settings(kv_cache_dtype=kept_in, kernels=kernels))
        plain, _ = create_executor(tmp_path / kind, settings(kernels=kernels))
        got, want = (forced_logits(each, PROMPTS[3], range(8), 16).log_softmax(-1) for each in (executor, plain))
        # The median: a token near a tie of experts goes to others, and all after it differ.
        assert 0 < (got - want).abs().median() < 0.15
        assert {tensor.dtype for tensor in cache_of(executor)} == {
            torch.int8 if kept_in == "int8" else torch.float8_e4m3fn
        }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"kernels": "reference", "kv_cache_dtype": "int8"},
            "kv_cache_dtype is int8, but kernels is reference: the reference kernels support only an unquantized",
        ),
        (
            {"kernels": "reference", "kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype is fp8_e4m3, but kernels is reference: the reference kernels support only an unquantized",
        ),
    ],
)
def test_what_cannot_keep_it_is_refused_by_name(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=message):
        create_executor(tmp_path, settings(**more))


def test_the_scripted_engine_keeps_nothing_and_refuses_it() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is int8, but executor is fake"):
        build_engine("", EngineConfig(executor="fake", kv_cache_dtype="int8"))


@needs_compiler
@pytest.mark.parametrize("kept_in", KINDS)
def test_the_native_kernels_keep_eight_bits_and_stay_the_same_in_any_batch(kept_in: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    _, resolved = create_executor(tmp_path, settings(kv_cache_dtype=kept_in, batch_invariant=True))
    assert resolved.kernels == "native"
