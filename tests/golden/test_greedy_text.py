"""Owns the promise that text does not depend on how it was scheduled: chunks, neighbours, cache hits, migration.
Never uses bfloat16, where two orders of addition may flip a near tie."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, SchedulerConfig
from engine.protocol import SamplingParams
from tests.golden.bench import Bench
from tests.golden.models import make_executor

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True)
# Words of the prompts, and " the" (260), so that each of them has something to change.
CONTROLLED = dataclasses.replace(
    SAMPLED,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias=((260, 4.0), (28, -100.0)),
    bad_words=((260, 2104), (30,)),
)


# Most of it is forced: runs of several tokens, some of which have another spelling that the model likes better.
RECORD = dataclasses.replace(
    GREEDY,
    ignore_eos=False,
    max_tokens=60,
    grammar="""start: %json {
        "type": "object",
        "properties": {
            "the capital city": {"enum": ["Paris", "London", "Rome"]},
            "number of inhabitants": {"type": "integer", "minimum": 0, "maximum": 9999}
        },
        "required": ["the capital city", "number of inhabitants"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}
    }""",
)


@pytest.fixture(scope="module")
def bench(shallow_model: Path) -> Bench:
    return Bench(*make_executor(shallow_model, "float32", num_threads=1))


@pytest.fixture(scope="module")
def whole() -> Bench:
    """The default model, with all its layers."""
    return Bench(*make_executor(prepare_model(DEFAULT_MODEL), "float32", num_threads=1))


@pytest.fixture(scope="module")
def transformers_model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(prepare_model(DEFAULT_MODEL), dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def alone(bench: Bench) -> list[list[int]]:
    """Answer each prompt by itself, unchunked, without a prefix cache."""
    return [bench.serve([prompt], GREEDY, enable_prefix_caching=False)[0] for prompt in bench.prompts]


def test_greedy_text_equals_that_of_transformers_for_every_chunk_budget(
    whole: Bench, transformers_model: PreTrainedModel
) -> None:
    prompts = whole.prompts[:3]
    texts = whole.serve(prompts, GREEDY)
    for budget in (7, 64):
        settings = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, "max_num_seqs": 3}
        assert whole.serve(prompts, GREEDY, enable_prefix_caching=False, **settings) == texts
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        answer = transformers_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        assert answer[0, len(prompt) :].tolist() == text


@pytest.mark.parametrize("budget", [4, 64, 512])
def test_greedy_text_is_the_same_for_every_chunk_budget_and_any_neighbours(
    bench: Bench, alone: list[list[int]], budget: int
) -> None:
    settings = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, "max_num_seqs": min(6, budget - 1)}
    assert bench.serve(bench.prompts, GREEDY, enable_prefix_caching=False, **settings) == alone


@pytest.mark.parametrize("budget", [64, 512])
def test_greedy_text_is_the_same_after_a_prefix_cache_hit(bench: Bench, alone: list[list[int]], budget: int) -> None:
    bench.cached.clear()
    settings = {"max_num_batched_tokens": budget, "max_prefill_tokens": budget, "max_num_seqs": 6}
    assert bench.serve(bench.prompts, GREEDY, rounds=2, **settings) == alone
    assert sorted(bench.cached.values())[1] >= 16, f"nothing was reused: {bench.cached}"


def test_greedy_text_is_the_same_when_requests_wait_for_blocks(bench: Bench, alone: list[list[int]]) -> None:
    """There are so few blocks that most requests are admitted late, into blocks that others have just left."""
    longest = max(len(prompt) for prompt in bench.prompts) + NEW_TOKENS
    blocks = -(-longest // bench.resolved.block_size) + 6
    settings = {"num_kv_blocks": blocks, "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_prefill_tokens": 64}
    assert bench.serve(bench.prompts, GREEDY, **settings) == alone


@pytest.mark.parametrize("params", [pytest.param(GREEDY, marks=pytest.mark.slow), CONTROLLED])
@pytest.mark.parametrize("how", ["lifo", "retract"])
def test_text_is_the_same_after_a_preemption_computes_it_again(bench: Bench, how: str, params: SamplingParams) -> None:
    """S4-R10: with a chunk that ended between prompt and answer,
    a preempted request was taken for finished too early."""
    prompts = [prompt[:20] for prompt in bench.prompts[:3]]
    expected = [bench.serve([prompt], params, enable_prefix_caching=False)[0] for prompt in prompts]
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy=how, watermark_blocks=0)
    budget = {"max_num_batched_tokens": 24, "max_prefill_tokens": 24, "max_num_seqs": 3}
    # Two prompts of 2 blocks fit into 5, and grow to 3 blocks each.
    settings = {"num_kv_blocks": 5, "scheduler": policy, "enable_prefix_caching": False}
    assert bench.serve(prompts, params, **settings, **budget) == expected
    assert bench.preemptions > 0


@pytest.mark.parametrize(
    "params", [*(pytest.param(params, marks=pytest.mark.slow) for params in (GREEDY, SAMPLED)), CONTROLLED]
)
def test_text_is_the_same_with_overlap_which_feeds_tokens_before_they_are_read(
    bench: Bench, params: SamplingParams
) -> None:
    settings = {"max_num_batched_tokens": 64, "max_prefill_tokens": 64, "max_num_seqs": 2}
    plain = bench.serve(bench.prompts[:3], params, **settings)
    assert bench.serve(bench.prompts[:3], params, overlap=True, **settings) == plain


@pytest.mark.parametrize("owner", ["scheduler", "engine"])
def test_greedy_text_is_the_same_whoever_cuts_the_prompt(bench: Bench, alone: list[list[int]], owner: str) -> None:
    settings = {"max_num_batched_tokens": 64, "max_prefill_tokens": 48, "max_num_seqs": 3}
    assert bench.serve(bench.prompts[:3], GREEDY, scheduler=SchedulerConfig(chunk_owner=owner), **settings) == alone[:3]


def test_sampled_text_depends_on_the_seed_only(bench: Bench) -> None:
    prompts = bench.prompts[:3]
    whole = [bench.serve([prompt], SAMPLED)[0] for prompt in prompts]
    assert bench.serve(prompts, SAMPLED, max_num_batched_tokens=5, max_prefill_tokens=5, max_num_seqs=3) == whole
    assert bench.serve(prompts[:1], dataclasses.replace(SAMPLED, seed=6)) != whole[:1]


@pytest.mark.parametrize("params", [SAMPLED, CONTROLLED])
def test_a_stream_resumed_elsewhere_goes_on_with_the_same_tokens(bench: Bench, params: SamplingParams) -> None:
    """This is migration: prompt and tokens so far, resubmitted with the same seed, give the rest of the same answer."""
    prompt = bench.prompts[0]
    whole = bench.serve([prompt], params)[0]
    rest = dataclasses.replace(params, max_tokens=NEW_TOKENS - 9)
    assert bench.serve([prompt + whole[:9]], rest, num_answer_tokens=9)[0] == whole[9:]


@pytest.mark.parametrize("params", [RECORD, dataclasses.replace(RECORD, temperature=0.9, seed=5)])
def test_an_answer_in_a_grammar_is_the_same_with_what_is_forced_drafted_or_not_in_fewer_steps(
    bench: Bench, shallow_model: Path, params: SamplingParams
) -> None:
    assert bench.resolved.num_speculative_tokens > 0, "by default"
    prompts = [prompt[:20] for prompt in bench.prompts[:2]]
    one_by_one = bench.serve(prompts, params, num_speculative_tokens=0)
    steps = bench.steps
    assert bench.serve(prompts, params) == one_by_one
    assert bench.steps < 0.7 * steps
    budget = {"max_num_batched_tokens": 20, "max_prefill_tokens": 8, "max_num_seqs": 2}
    assert bench.serve(prompts, params, **budget) == one_by_one
    assert bench.serve(prompts, params, overlap=True, num_speculative_tokens=0) == one_by_one
    tokenizer = Tokenizer.from_file(str(shallow_model / "tokenizer.json"))
    for text in one_by_one:
        record = json.loads(tokenizer.decode(text))
        assert record["the capital city"] in ("Paris", "London", "Rome")
        assert isinstance(record["number of inhabitants"], int)


def test_an_answer_in_a_grammar_goes_on_elsewhere_and_after_a_preemption(bench: Bench) -> None:
    prompts = [prompt[:20] for prompt in bench.prompts[:3]]
    alone = [bench.serve([prompt], RECORD, enable_prefix_caching=False)[0] for prompt in prompts]
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)
    settings = {"num_kv_blocks": 6, "scheduler": policy, "enable_prefix_caching": False, "max_num_seqs": 3}
    assert bench.serve(prompts, RECORD, **settings) == alone
    assert bench.preemptions > 0
    for cut in (1, 9):
        rest = dataclasses.replace(RECORD, max_tokens=60 - cut)
        assert bench.serve([prompts[0] + alone[0][:cut]], rest, num_answer_tokens=cut)[0] == alone[0][cut:]


def test_penalised_and_banned_text_equals_that_of_transformers(
    whole: Bench, transformers_model: PreTrainedModel
) -> None:
    params = dataclasses.replace(GREEDY, repetition_penalty=1.3, bad_words=((30,), (260, 2104)))
    for prompt in whole.prompts[:3]:
        (text,) = whole.serve([prompt], params)
        answer = transformers_model.generate(
            ids := torch.tensor([prompt]),
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.3,
            bad_words_ids=[list(word) for word in params.bad_words],
        )
        assert answer[0, len(prompt) :].tolist() == text
        assert text != whole.serve([prompt], GREEDY)[0], "the controls change something"
