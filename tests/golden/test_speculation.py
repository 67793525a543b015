"""Owns the promise that drafts change nothing: with or without them, a seeded answer is the same token for token.
Compares distributions only where tokens are drawn in a way that leaves nothing else to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build.executor import create_executor
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig, SchedulerConfig, SpeculativeConfig
from engine.execution.executor import TorchExecutor
from engine.protocol import SamplingParams
from engine.step import RowSampling, StepPlan
from tests.golden.bench import Bench
from tests.golden.models import make_executor
from tests.golden.test_greedy_text import CONTROLLED, GREEDY, RECORD, SAMPLED
from tests.support.compiler import needs_compiler
from tests.support.plans import chunk, decode
from tests.support.tiny_models import VOCAB, save_model

NONE = SpeculativeConfig(method="none")
EAGER = SpeculativeConfig(method="suffix", min_match=1, num_tokens=6, adaptive=False, free_tokens=8)
NGRAM = dataclasses.replace(EAGER, method="ngram", max_match=3)
ADAPTIVE = SpeculativeConfig(method="suffix", free_tokens=8)
SCORED = dataclasses.replace(SAMPLED, logprobs=2, seed=9)
FEW_BLOCKS = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)


@pytest.fixture(scope="module")
def bench(shallow_model: Path) -> Iterator[Bench]:
    bench = Bench(*make_executor(shallow_model, "float32", num_threads=1))
    yield bench
    bench.executor.shutdown()


PARAMS = [GREEDY, SAMPLED, CONTROLLED, SCORED, RECORD]
_plain: dict[SamplingParams, Any] = {}


def plain(bench: Bench, params: SamplingParams) -> tuple[list[list[int]], list[list[float]]]:
    """Return texts and log-probabilities without any drafts, not even those that a grammar forces."""
    if params not in _plain:
        texts = bench.serve(prompts(bench), params, num_speculative_tokens=0, speculative=NONE)
        _plain[params] = texts, bench.logprobs
    return _plain[params]


def prompts(bench: Bench) -> list[list[int]]:
    """Return the prompts of code, of numbers, and of words that repeat themselves."""
    return [prompt[:40] for prompt in (bench.prompts[2], bench.prompts[3], bench.prompts[5])]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "controlled", "scored", "grammar"])
@pytest.mark.parametrize("speculative", [EAGER, NGRAM, ADAPTIVE], ids=["suffix", "ngram", "adaptive"])
def test_answers_are_those_without_drafts(bench: Bench, params: SamplingParams, speculative: SpeculativeConfig) -> None:
    want = plain(bench, params)
    settings = {"num_speculative_tokens": 3, "speculative": speculative}
    assert bench.serve(prompts(bench), params, **settings) == want[0]
    for got, one in zip(bench.logprobs, want[1], strict=True):
        assert got == pytest.approx(one, abs=1e-4)
    small = {"max_num_batched_tokens": 15, "max_prefill_tokens": 7, "max_num_seqs": 3}
    assert bench.serve(prompts(bench), params, **settings, **small) == want[0], "in small steps"


@pytest.mark.parametrize("params", [GREEDY, CONTROLLED], ids=["greedy", "controlled"])
def test_answers_with_drafts_are_the_same_after_a_preemption_and_a_migration(
    bench: Bench, params: SamplingParams
) -> None:
    want, _ = plain(bench, params)
    tight: dict[str, Any] = {"num_kv_blocks": 10, "scheduler": FEW_BLOCKS, "enable_prefix_caching": False}
    settings = {"num_speculative_tokens": 3, "speculative": EAGER}
    assert bench.serve(prompts(bench), params, **settings, **tight) == want
    assert bench.preemptions > 0
    for cut in (1, 9):
        rest = dataclasses.replace(params, max_tokens=24 - cut)
        begun = [prompt + text[:cut] for prompt, text in zip(prompts(bench), want, strict=True)]
        assert bench.serve(begun, rest, num_answer_tokens=cut, **settings) == [text[cut:] for text in want]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_ends_at_the_same_token_wherever_it_stands_in_a_draft(bench: Bench, params: SamplingParams) -> None:
    want, _ = plain(bench, params)
    settings = {"num_speculative_tokens": 3, "speculative": EAGER}
    for stop in set(want[2]):
        stopped = dataclasses.replace(params, stop_token_ids=(stop,))
        assert bench.serve(prompts(bench)[2:], stopped, **settings) == [want[2][: want[2].index(stop)]]
    for most in (1, 2, 5):
        short = dataclasses.replace(params, max_tokens=most)
        assert bench.serve(prompts(bench), short, **settings) == [text[:most] for text in want]


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """With all layers, because the first ones alone do not repeat a text."""
    bench = Bench(*make_executor(prepare_model(DEFAULT_MODEL), "float32"))
    prompt = prompts(bench)[2:]
    bench.serve(prompt, GREEDY, speculative=NONE)
    steps = bench.steps
    bench.serve(prompt, GREEDY, speculative=ADAPTIVE, num_speculative_tokens=3)
    assert bench.steps < 0.5 * steps
    bench.executor.shutdown()


@needs_compiler
@pytest.mark.parametrize("params", [GREEDY, SCORED], ids=["greedy", "scored"])
def test_in_bfloat16_the_native_kernels_give_the_same_to_the_bit_and_so_drafts_are_on(
    shallow_model: Path, params: SamplingParams
) -> None:
    config = EngineConfig(dtype="bfloat16", num_kv_blocks=160, batch_invariant=True)
    bench = Bench(*create_executor(shallow_model, config))
    assert bench.resolved.speculative.method == "suffix"
    scored = dataclasses.replace(params, logprobs=1)
    want = bench.serve(prompts(bench), scored, speculative=NONE), bench.logprobs
    for speculative in (EAGER, bench.resolved.speculative):
        assert (bench.serve(prompts(bench), scored, speculative=speculative), bench.logprobs) == want
    bench.executor.shutdown()


def test_drafts_are_off_where_another_batch_gives_other_bits(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    executor, resolved = create_executor(tmp_path, EngineConfig(kernels="torch_cpu", num_kv_blocks=4))
    assert resolved.speculative.method == "none"
    assert "sums depend on how many rows" in resolved.reasons["speculative"]
    executor.shutdown()


# --- what is drawn from ----------------------------------------------------------------------------------------------

SEEDS, ROWS, KEPT = 6000, 50, 8
DRAWN = RowSampling(temperature=1.0, top_k=KEPT, top_p=1.0, min_p=0.0, seed=0)
CONTEXT = list(range(3, 19))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchExecutor]:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    executor, _ = create_executor(directory, EngineConfig(dtype="float32", num_kv_blocks=4 + 2 * ROWS))
    yield executor
    executor.shutdown()


def distribution(executor: TorchExecutor, tokens: list[int]) -> torch.Tensor:
    """Return the distribution of the next token: the model's own over its KEPT likeliest tokens, by torch's softmax.
    # [VOCAB] float64"""
    logits = executor.logits(StepPlan(0, (chunk("p", tokens, 0, len(tokens), (0, 1)),)))[-1].double()
    least = logits.topk(KEPT).values[-1]
    return logits.masked_fill(logits < least, -torch.inf).softmax(dim=-1)


def chi_square(counts: torch.Tensor, want: torch.Tensor) -> float:
    """Pearson's statistic over the tokens that may be drawn; about KEPT - 1 where counts are drawn from `want`."""
    assert not counts[want == 0].any()
    expected = want[want > 0] * counts.sum()
    return float(((counts[want > 0] - expected) ** 2 / expected).sum())


MOST_CHI_SQUARE = 30.0
"""With 7 degrees of freedom, one draw in ten thousand exceeds 29.9.
Seeds are fixed, so a test always passes or always fails."""


def test_sampled_tokens_have_the_models_distribution_whatever_was_drafted(tiny: TorchExecutor) -> None:
    """Each row has the newest token and two drafts.
    Over many seeds each sampled token is judged given those before it."""
    blocks = [(2 * number + 4, 2 * number + 5) for number in range(ROWS)]
    for number in range(ROWS):  # K and V of the context, for one row after the other
        tiny.launch(StepPlan(number, (chunk("c", CONTEXT, 0, len(CONTEXT), blocks[number]),)))
        tiny.collect()
    first = distribution(tiny, [*CONTEXT, 5])
    drafts = (5, int(first.argmax()), int(distribution(tiny, [*CONTEXT, 5, int(first.argmax())]).argmax()))
    counts = torch.zeros(3, VOCAB, dtype=torch.float64)
    for begin in range(0, SEEDS, ROWS):
        rows = [
            decode(str(number), 5, len(CONTEXT), blocks[number])._replace(
                token_ids=drafts,
                sampling=dataclasses.replace(DRAWN, seed=begin + number),
            )
            for number in range(ROWS)
        ]
        tiny.launch(StepPlan(begin, tuple(rows)))
        for tokens in tiny.collect().sampled:
            for place, token in enumerate(tokens):
                counts[place, token] += 1
    assert counts[0].sum() == SEEDS
    assert counts[1].sum() == counts[0, drafts[1]], "a draft is kept exactly where it would have been drawn"
    assert counts[2].sum() == counts[1, drafts[2]] > 300
    for place in range(3):
        assert chi_square(counts[place], distribution(tiny, [*CONTEXT, *drafts[: place + 1]])) < MOST_CHI_SQUARE
