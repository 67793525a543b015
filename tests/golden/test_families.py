"""Owns the promise that a family's text is that of transformers, however it was scheduled; on tiny random checkpoints.
Never uses bfloat16 where two orders of addition may flip a near tie."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import SchedulerConfig
from engine.protocol import SamplingParams
from tests.golden.bench import Bench
from tests.golden.models import make_executor
from tests.support.compiler import needs_compiler
from tests.support.tiny_models import DISTINCT_FAMILIES, HYBRIDS, VOCAB, WINDOW, greedy_answer, renamed_slow, save_model

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(0, VOCAB, (length,), generator=GENERATOR).tolist() for length in (97, 41, WINDOW, 5)]


def kept(kind: str) -> dict[str, Any]:
    """A prefix hit of a hybrid starts from a snapshot. Without hits there are none, so that no chunk ends at one."""
    return {"scheduler": SchedulerConfig(state_snapshot_tokens=16)} if kind in HYBRIDS else {}


class FamilyBench(Bench):
    """The bench of one family, and what transformers answers to its prompts."""

    def __init__(self, kind: str, directory: Path) -> None:
        model = save_model(kind, directory)
        self.want = [greedy_answer(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
        super().__init__(*make_executor(directory, "float32", num_threads=1, **kept(kind)), PROMPTS)
        plain = dataclasses.replace(self.resolved.scheduler, state_snapshot_tokens=0)
        self.without_hits: dict[str, Any] = {"enable_prefix_caching": False, "scheduler": plain}


@pytest.fixture(scope="module", params=renamed_slow(DISTINCT_FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyBench:
    return FamilyBench(request.param, tmp_path_factory.mktemp(request.param))


def budget(tokens: int) -> dict[str, int]:
    seqs = min(len(PROMPTS), tokens - 1)
    return {"max_num_batched_tokens": tokens, "max_prefill_tokens": tokens, "max_num_seqs": seqs}


@pytest.mark.parametrize("tokens", [3, 16, 512])
def test_greedy_text_equals_that_of_transformers_for_every_chunk_budget_beside_any_neighbours(
    family: FamilyBench, tokens: int
) -> None:
    assert family.serve(PROMPTS, GREEDY, **family.without_hits, **budget(tokens)) == family.want


@pytest.mark.parametrize("tokens", [16, 512])
def test_greedy_text_is_the_same_after_a_prefix_cache_hit(family: FamilyBench, tokens: int) -> None:
    """The longest prompt's cached blocks end far behind a window, and the rest of it begins within one."""
    family.cached.clear()
    assert family.serve(PROMPTS, GREEDY, rounds=2, **budget(tokens)) == family.want
    assert family.cached["0"] >= 3 * WINDOW


@pytest.mark.parametrize("how", ["lifo", "retract"])
def test_greedy_text_is_the_same_after_a_preemption_computes_it_again(family: FamilyBench, how: str) -> None:
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy=how, watermark_blocks=0)
    # Two prompts of 2 and 3 blocks fit into 6, and each grows by a block.
    settings: dict[str, Any] = {"num_kv_blocks": 6, "scheduler": policy, "enable_prefix_caching": False}
    prompts = [PROMPTS[1], PROMPTS[0][:30], PROMPTS[2]]
    want = [family.want[1], *(family.serve([prompt], GREEDY, **family.without_hits)[0] for prompt in prompts[1:])]
    assert want[2] == family.want[2]
    assert family.serve(prompts, GREEDY, **settings, **budget(24)) == want
    assert family.preemptions > 0


@needs_compiler
@pytest.mark.parametrize("kind", renamed_slow(DISTINCT_FAMILIES))
def test_in_bfloat16_the_native_kernels_give_the_same_bits_in_any_batch(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    bench = Bench(*make_executor(tmp_path, "bfloat16", batch_invariant=True, num_threads=1, **kept(kind)), PROMPTS)
    scored = dataclasses.replace(GREEDY, logprobs=1)
    texts, logprobs = [], []
    for prompt in PROMPTS:
        texts += bench.serve([prompt], scored, enable_prefix_caching=False)
        logprobs += bench.logprobs
    for rounds in (1, 2):
        bench.cached.clear()
        assert (bench.serve(PROMPTS, scored, rounds=rounds, **budget(7)), bench.logprobs) == (texts, logprobs)
    assert bench.cached["0"] >= 3 * WINDOW
