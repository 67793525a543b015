"""Owns the promise of `batch_invariant`: in bfloat16, tokens and
log-probabilities are the same to the bit, in any schedule.
Never allows a tolerance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.build.executor import create_executor
from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.protocol import SamplingParams
from tests.golden.bench import Bench
from tests.support.compiler import needs_compiler

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
FEW_BLOCKS = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)

pytestmark = [needs_compiler, pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])]


@pytest.fixture(scope="module")
def bench(shallow_model: Path) -> Bench:
    config = EngineConfig(dtype="bfloat16", num_kv_blocks=160, batch_invariant=True, num_threads=1)
    return Bench(*create_executor(shallow_model, config))


def alone(bench: Bench, params: SamplingParams, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Return texts and log-probabilities of each prompt by itself, unchunked, without a prefix cache."""
    texts, logprobs = [], []
    for prompt in prompts:
        texts += bench.serve([prompt], params, enable_prefix_caching=False)
        logprobs += bench.logprobs
    assert all(len(row) == NEW_TOKENS for row in logprobs)
    return texts, logprobs


@pytest.mark.parametrize("budget", [7, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (64, 512))])
def test_bits_are_the_same_in_any_batch_and_for_every_chunk_budget(
    bench: Bench, params: SamplingParams, budget: int
) -> None:
    settings: dict[str, Any] = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, "max_num_seqs": 6}
    want = alone(bench, params, bench.prompts)
    assert (bench.serve(bench.prompts, params, enable_prefix_caching=False, **settings), bench.logprobs) == want
    assert (bench.serve(bench.prompts, params, rounds=2, **settings), bench.logprobs) == want  # from the prefix cache


def test_bits_are_the_same_after_a_preemption(bench: Bench, params: SamplingParams) -> None:
    prompts = [prompt[:20] for prompt in bench.prompts[:3]]
    want = alone(bench, params, prompts)
    budget = {"max_num_batched_tokens": 24, "max_prefill_tokens": 24, "max_num_seqs": 3, "num_kv_blocks": 5}
    got = bench.serve(prompts, params, scheduler=FEW_BLOCKS, enable_prefix_caching=False, **budget)
    assert bench.preemptions > 0
    assert (got, bench.logprobs) == want


def test_bits_are_the_same_after_a_migration(bench: Bench, params: SamplingParams) -> None:
    (text,), (logprobs,) = alone(bench, params, bench.prompts[:1])
    for cut in (1, 9):
        rest = dataclasses.replace(params, max_tokens=NEW_TOKENS - cut)
        assert bench.serve([bench.prompts[0] + text[:cut]], rest, num_answer_tokens=cut) == [text[cut:]]
        assert bench.logprobs == [logprobs[cut:]]


def test_batch_invariance_is_refused_where_the_kernels_do_not_keep_it(
    shallow_model: Path, params: SamplingParams
) -> None:
    with pytest.raises(
        ConfigError, match="batch_invariant is true, but kernels is torch_cpu: on a CPU, only the native"
    ):
        create_executor(shallow_model, EngineConfig(batch_invariant=True, kernels="torch_cpu"))
