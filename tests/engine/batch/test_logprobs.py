"""Owns the contract of log-probabilities: their values, their order, the seams between chunks, and the scratch bound.
Never compares with tolerances of the default model; tests/golden does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import logprobs
from engine.batch.logprobs import SCORED_POSITIONS, sampled_logprobs, token_logprobs
from engine.batch.row_order import NO_LOGIT
from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.execution.executor import TorchExecutor
from engine.models.computed import Computed
from engine.protocol import MAX_LOGPROBS, TokenLogprobs
from engine.step import PromptScoring, StepOutput, StepPlan
from tests.support.plans import chunk, decode, greedy, prompt_scores, run, scored
from tests.support.seeds import next_seed
from tests.support.tiny_models import VOCAB, save_model

TOKENS = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(6)).tolist()
BLOCKS = (9, 3, 11, 0, 7, 19, 12, 13, 14, 15)
OTHER_BLOCKS = (1, 2, 4, 5, 6)


def oracle(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Compute the alternatives in double precision by sorting everything. logits: [vocab]"""
    values = logits.double().log_softmax(-1).tolist()
    order = sorted(range(len(values)), key=lambda other: (-logits[other].item(), other))
    return values[token], [(other, values[other]) for other in order[:count]]


def rank_of(logits: Tensor, token: int) -> int:
    """Compute the rank by sorting everything. logits: [vocab]"""
    return sorted(range(len(logits)), key=lambda other: (-logits[other].item(), other)).index(token) + 1


def check(got: TokenLogprobs | None, logits: Tensor, token: int, count: int) -> None:
    value, top = oracle(logits, token, count)
    assert got is not None
    assert (got.token_id, got.logprob) == (token, pytest.approx(value, abs=1e-5))
    assert [other for other, _ in got.top] == [other for other, _ in top]
    assert [other for _, other in got.top] == pytest.approx([other for _, other in top], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_gets_its_token_and_as_many_alternatives_as_it_asked_for(dtype: torch.dtype) -> None:
    seed = next_seed()
    logits = (torch.randn(40, 301, generator=torch.Generator().manual_seed(seed)) * 8).to(dtype)
    rng = random.Random(seed)
    tokens, counts = [rng.randrange(301) for _ in range(40)], [rng.randrange(MAX_LOGPROBS + 1) for _ in range(40)]
    for got, row, token, count in zip(token_logprobs(logits, tokens, counts), logits, tokens, counts, strict=True):
        check(got, row.float(), token, count)


def test_equal_alternatives_come_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([[-0.0, 1.0, 0.0, 1.0, -3.0, 0.0, -0.0], [-2.0, -1.0, -1.0, -1.0, -torch.inf, -2.0, -1.0]])
    first, second = token_logprobs(logits, [0, 4], [7, 3])
    assert first is not None
    assert second is not None
    assert [token for token, _ in first.top] == [1, 3, 0, 2, 5, 6, 4]
    assert [token for token, _ in second.top] == [1, 2, 3]
    assert second.logprob == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_its_rank_among_all_tokens_wherever_it_is(dtype: torch.dtype) -> None:
    """In bfloat16 many logits are equal. Their order is then that of the alternatives."""
    logits = torch.randn(60, 301, generator=torch.Generator().manual_seed(9)).to(dtype)
    tokens = torch.randint(0, 301, (60,), generator=torch.Generator().manual_seed(10)).tolist()
    found = token_logprobs(logits, tokens, [20] * 60, ranked=True)
    for got, row, token in zip(found, logits, tokens, strict=True):
        assert got is not None
        assert got.rank == rank_of(row, token)
        top = [other for other, _ in got.top]
        assert (token in top) is (got.rank <= 20)
        assert token not in top or top.index(token) + 1 == got.rank
    assert all(got is not None and got.rank is None for got in token_logprobs(logits, tokens, [1] * 60))


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (got,) = token_logprobs(torch.zeros(1, 3), [2], [MAX_LOGPROBS])
    assert got is not None
    assert [token for token, _ in got.top] == [0, 1, 2]


@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_a_row_without_a_distribution_has_none_and_its_neighbours_have_theirs(bad: list[float]) -> None:
    before, none, after = token_logprobs(torch.tensor([[0.0, 9.0], bad, [9.0, 0.0]]), [1, 1, 1], [2, 2, 0])
    assert none is None
    check(before, torch.tensor([0.0, 9.0]), 1, 2)
    check(after, torch.tensor([9.0, 0.0]), 1, 0)


def test_only_rows_that_ask_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = logprobs.token_logprobs
    monkeypatch.setattr(
        logprobs, "token_logprobs", lambda *given, **how: seen.append(len(given[0])) or real(*given, **how)
    )
    logits = torch.eye(4)
    assert sampled_logprobs(logits, [greedy()] * 4, [0, 1, 2, 3]) == {}
    assert seen == []
    found = sampled_logprobs(logits, [greedy(), greedy(0), greedy(2), greedy(2)], [0, 1, 2, None])
    assert (list(found), seen) == ([1, 2], [2])
    assert [len(score.top) for score in found.values() if score] == [0, 2]


# What an executor returns.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """Save a checkpoint, and return transformers' logits for TOKENS at every position.
    # [len(TOKENS), vocab]"""
    directory = tmp_path_factory.mktemp("qwen3")
    with torch.inference_mode():
        return directory, save_model("qwen3", directory)(torch.tensor([TOKENS])).logits[0].float()


@pytest.fixture(scope="module")
def executor(checkpoint: tuple[Path, Tensor]) -> Iterator[TorchExecutor]:
    executor, _ = create_executor(checkpoint[0], EngineConfig(dtype="float32", num_kv_blocks=20))
    yield executor
    executor.shutdown()


def step(executor: TorchExecutor, *rows: object) -> StepOutput:
    executor.launch(StepPlan(0, rows))  # type: ignore[arg-type]
    return executor.collect()


def assert_scores(got: list[TokenLogprobs], want: Tensor, count: int) -> None:
    """Check the scores of TOKENS[1:], each of which occurs once. want:
    transformers' logits of the same positions, [len(TOKENS), vocab]"""
    assert [score.token_id for score in got] == TOKENS[1 : len(got) + 1]
    for score, logits in zip(got, want.double().log_softmax(-1), strict=False):
        assert score.logprob == pytest.approx(logits[score.token_id].item(), abs=2e-4)
        assert [value for _, value in score.top] == pytest.approx(logits.topk(count).values.tolist(), abs=2e-4)
        assert [value for _, value in score.top] == pytest.approx([logits[i].item() for i, _ in score.top], abs=2e-4)


@settings(deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, len(TOKENS) - 1), max_size=12))
def test_any_partition_of_a_prompt_scores_every_token_once_and_as_transformers_does(
    checkpoint: tuple[Path, Tensor], executor: TorchExecutor, cuts: set[int]
) -> None:
    """S3-R2: a chunk's first token is predicted by the previous chunk,
    and nothing predicts the prompt's first token."""
    got = prompt_scores(executor, TOKENS, BLOCKS, [*sorted(cuts), len(TOKENS)], 3)
    assert len(got) == len(TOKENS) - 1
    assert_scores(got, checkpoint[1], 3)
    assert [score.rank for score in got if score.rank is not None and score.rank <= 3] == [
        place + 1 for score in got for place, (token, _) in enumerate(score.top) if token == score.token_id
    ]


@pytest.mark.parametrize("size", [1, 16, 64, 75, len(TOKENS) - 1, len(TOKENS)])
def test_chunks_of_any_size_score_every_token_once_and_as_transformers_does(
    checkpoint: tuple[Path, Tensor], executor: TorchExecutor, size: int
) -> None:
    ends = [min(start + size, len(TOKENS)) for start in range(0, len(TOKENS), size)]
    got = prompt_scores(executor, TOKENS, BLOCKS, ends, 5)
    assert len(got) == len(TOKENS) - 1
    assert_scores(got, checkpoint[1], 5)


def test_a_chunk_may_score_from_any_of_its_positions_on(
    checkpoint: tuple[Path, Tensor], executor: TorchExecutor
) -> None:
    """After a preemption, a chunk recomputes what is already scored, up to some position inside it."""
    before = scored("b", TOKENS, 0, 9, OTHER_BLOCKS)
    row = scored("a", TOKENS, 0, 40, BLOCKS)._replace(scoring=PromptScoring(25, tuple(TOKENS[26:36]), 0))
    got = step(executor, before, row).prompt_logprobs
    assert [score.token_id for score in got[1]] == TOKENS[26:36]
    want = checkpoint[1].log_softmax(-1)[range(25, 35), TOKENS[26:36]]
    assert [score.logprob for score in got[1]] == pytest.approx(want.tolist(), abs=2e-4)
    assert len(got[0]) == 9


def test_a_row_that_failed_returns_no_log_probability(executor: TorchExecutor) -> None:
    nothing_left = replace(greedy(num_logprobs=1), banned_token_ids=tuple(range(VOCAB)))
    output = step(executor, scored("a", TOKENS[:9], 0, 9, BLOCKS, 1)._replace(sampling=nothing_left))
    assert (output.failed, output.sampled) == (((0, NO_LOGIT),), ((),))
    assert (output.logprobs, output.prompt_logprobs) == ({}, {})


def test_one_chunk_equals_the_single_pass_to_the_last_bit(executor: TorchExecutor) -> None:
    tokens = TOKENS[: SCORED_POSITIONS + 1]  # so that both multiply matrices of the same shape
    with torch.inference_mode():
        computed = executor._forward(StepPlan(0, (chunk("a", tokens, 0, len(tokens), BLOCKS),)))
        logprobs = computed.logits_at(torch.arange(len(tokens) - 1)).log_softmax(-1)
    want = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).flatten().tolist()
    assert [score.logprob for score in prompt_scores(executor, tokens, BLOCKS, [len(tokens)])] == want


def test_a_prompt_of_any_length_holds_the_logits_of_few_positions_at_a_time(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3-B2: the logits of a whole prompt of 12,288 tokens take 3.7 GB with a vocabulary of 151,936."""
    sizes: list[int] = []
    real = executor._forward

    def forward(plan: StepPlan) -> Computed:
        computed = real(plan)
        return replace(computed, logits_at=lambda index: sizes.append(len(index)) or computed.logits_at(index))

    monkeypatch.setattr(executor, "_forward", forward)
    prompt_scores(executor, TOKENS, BLOCKS, [130, 150])
    assert sum(sizes) == len(TOKENS) - 1
    assert max(sizes) == SCORED_POSITIONS < 130


def test_a_step_that_asks_for_no_logits_computes_none(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    real = executor._forward

    def forward(plan: StepPlan) -> Computed:
        computed = real(plan)
        assert not len(computed.logits)
        return replace(computed, logits_at=None)

    monkeypatch.setattr(executor, "_forward", forward)
    last = chunk("a", TOKENS, 0, len(TOKENS), BLOCKS)._replace(sampling=None)
    assert step(executor, last).sampled == ((),)
    alone = scored("a", [5], 0, 1, BLOCKS)  # a prompt of one token: nothing predicts it
    assert step(executor, alone).prompt_logprobs == {0: ()}


def test_a_mixed_step_gives_every_row_the_log_probabilities_it_gets_alone(executor: TorchExecutor) -> None:
    asks = greedy(num_logprobs=2)
    run(executor, chunk("a", TOKENS, 0, 20, BLOCKS))
    rows = (
        decode("b", 3, 0, (16,)),
        decode("a", 7, 20, BLOCKS)._replace(sampling=replace(asks, banned_token_ids=tuple(range(0, VOCAB, 2)))),
        scored("c", TOKENS, 0, 40, OTHER_BLOCKS, 1),
        scored("d", TOKENS[:30], 0, 30, (17, 18))._replace(sampling=replace(asks, temperature=2.0, top_k=3, seed=4)),
    )
    together, alone = step(executor, *rows), [step(executor, row) for row in rows]
    assert (list(together.logprobs), list(together.prompt_logprobs)) == ([1, 3], [2, 3])
    for number, output in enumerate(alone):
        assert together.sampled[number] == output.sampled[0]
        for name in ("logprobs", "prompt_logprobs"):
            got, want = getattr(together, name).get(number, ()), getattr(output, name).get(0, ())
            assert [score.token_id for score in got] == [score.token_id for score in want]
            assert [score.logprob for score in got] == pytest.approx([score.logprob for score in want], abs=2e-4)


def test_a_sampled_token_has_the_models_own_log_probability(executor: TorchExecutor) -> None:
    """The reported value is not from the distribution that the token was drawn from, which bans,
    temperature and filters have changed."""
    best = int(executor.logits(StepPlan(0, (chunk("a", TOKENS, 0, 9, BLOCKS),)))[-1].argmax())
    changed = replace(greedy(3), temperature=3.0, top_k=4, min_p=0.01, seed=8, banned_token_ids=(best,))
    row = chunk("a", TOKENS[:9], 0, 9, BLOCKS)._replace(sampling=changed)
    logits = executor.logits(StepPlan(0, (row,)))[-1]
    output = step(executor, row)
    ((token,),) = output.sampled
    (found,) = output.logprobs[0]
    assert token != best == found.top[0][0]
    check(found, logits, token, 3)


def test_a_row_whose_prompt_has_no_finite_logits_fails_alone(checkpoint: tuple[Path, Tensor]) -> None:
    executor, _ = create_executor(checkpoint[0], EngineConfig(dtype="float32", num_kv_blocks=20))
    good, bad = scored("good", [1, 2, 3], 0, 3, (0,)), scored("bad", [1, 7, 4, 5], 0, 3, (1,))
    expected = step(executor, good).prompt_logprobs[0]
    executor.model.decoder.weights.embedding[7] = torch.nan  # the row that reads this token gets NaN
    asks = chunk("asks", [7], 0, 1, (2,))._replace(sampling=greedy(num_logprobs=1))
    output = step(executor, bad, good, asks)
    assert output.failed == ((0, NO_LOGIT), (2, NO_LOGIT))
    assert [score.token_id for score in output.prompt_logprobs[1]] == [score.token_id for score in expected]
    assert (list(output.prompt_logprobs), output.logprobs) == ([1], {})
