"""Owns the contract of what changes logits before a token is chosen, against the naive definition and at the seam.
Never tests what a control does to text; tests/golden compares that with transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.batch.logit_controls import Within, apply_controls, banned_tokens, bans_after
from engine.config import SchedulerConfig
from engine.protocol import RequestRejected, SamplingParams, Submission
from engine.scheduling.request import create_request
from engine.step import PENDING_TOKEN, LogitControls, RowKind, RowSampling
from kernels import reference
from tests.support.engines import EOS, VOCAB, RecordingCore, resolved_config
from tests.support.plan_rows import rows_of
from tests.support.seeds import next_seed

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}


def row(controls: LogitControls | None = None, banned: tuple[int, ...] = ()) -> RowSampling:
    return RowSampling(1.0, 0, 1.0, 0.0, 0, banned, controls=controls)


def random_controls(draw: random.Random, vocab: int) -> LogitControls:
    def tokens(most: int) -> tuple[int, ...]:
        return tuple(draw.sample(range(vocab), draw.randint(1, min(most, vocab))))

    return LogitControls(
        allowed_token_ids=draw.choice([None, tokens(vocab)]),
        logit_bias=draw.choice([(), tuple((token, draw.uniform(-100, 100)) for token in tokens(5))]),
        repetition_penalty=draw.choice([1.0, 0.5, 1.3]),
        prompt_token_ids=draw.choice([(), tokens(8)]),
        frequency_penalty=draw.choice([0.0, -2.0, 0.7]),
        presence_penalty=draw.choice([0.0, 2.0, -0.3]),
        bad_words=draw.choice([(), ((3,), (1, 2), (2, 2, 1))]),
    )


def by_definition(logits: torch.Tensor, spec: RowSampling, answer: tuple[int, ...]) -> torch.Tensor:
    controls = spec.controls or LogitControls()
    changed = reference.control_logits(
        logits,
        allowed=controls.allowed_token_ids,
        bias=controls.logit_bias,
        repetition_penalty=controls.repetition_penalty,
        frequency_penalty=controls.frequency_penalty,
        presence_penalty=controls.presence_penalty,
        bad_words=controls.bad_words,
        prompt=controls.prompt_token_ids if controls.repetition_penalty != 1.0 else (),
        answer=answer,
    )
    changed[list(spec.banned_token_ids)] = -torch.inf
    return changed


def test_a_batch_of_mixed_rows_equals_the_definition() -> None:
    seed = next_seed()
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(30):
        vocab = draw.choice([5, 17])
        logits = torch.randn(6, vocab, generator=generator) * 5
        rows = [row(draw.choice([None, random_controls(draw, vocab)]), draw.choice([(), (0, 4)])) for _ in range(6)]
        answers = [tuple(draw.randrange(4) for _ in range(draw.choice([0, 1, 2, 9]))) for _ in rows]
        kept = logits.clone()
        want = torch.stack([by_definition(*case) for case in zip(logits, rows, answers, strict=True)])
        torch.testing.assert_close(apply_controls(logits, rows, answers), want, atol=1e-5, rtol=1e-5)
        assert torch.equal(logits, kept), "log-probabilities are read from them"


def words_of(allowed: list[set[int]], vocab: int) -> torch.Tensor:
    """Pack the allowed tokens as llguidance does."""
    words = [[0] * -(-vocab // 32) for _ in allowed]
    for row_words, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            row_words[token // 32] |= 1 << token % 32
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in words], dtype=torch.int32)


def test_a_batch_with_grammars_equals_the_definition() -> None:
    seed = next_seed()
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for vocab in (5, 31, 32, 33, 64, 70):
        logits = torch.randn(6, vocab, generator=generator) * 5
        rows = [row(random_controls(draw, vocab), draw.choice([(), (0, 4)])) for _ in range(6)]
        limited = draw.sample(range(6), 4)
        allowed = [set(draw.sample(range(vocab), draw.choice([1, 2, vocab]))) for _ in limited]
        allowed[0] = {0, 4}  # in some rows, everything that it allows is banned
        want = torch.stack([by_definition(*case) for case in zip(logits, rows, [()] * 6, strict=True)])
        for number, tokens in zip(limited, allowed, strict=True):
            want[number] = reference.keep_within(want[number], logits[number], sorted(tokens))
        within = Within(torch.tensor(limited), words_of(allowed, vocab))
        torch.testing.assert_close(apply_controls(logits, rows, [()] * 6, within), want, atol=1e-5, rtol=1e-5)


def test_a_grammar_overrules_what_bans_all_that_it_allows_and_nothing_else() -> None:
    rows = [row(LogitControls(grammar="g"), banned=(1, 2)), row(LogitControls(grammar="g"), banned=(1,))]
    within = Within(torch.tensor([0, 1]), words_of([{1, 2}, {1, 2}], 4))
    changed = apply_controls(torch.tensor([[0.0, 1.0, 2.0, 9.0]] * 2), rows, [(), ()], within)
    inf = float("inf")
    assert changed.tolist() == [[-inf, 1.0, 2.0, -inf], [-inf, -inf, 2.0, -inf]]


def test_logits_that_nothing_changes_are_not_copied() -> None:
    logits = torch.arange(8.0).view(2, 4)
    assert apply_controls(logits, [row(), row()], [(), ()]) is logits


def test_a_word_of_several_tokens_is_banned_only_where_the_answer_ends_with_its_beginning() -> None:
    rows = [row(LogitControls(bad_words=((1, 2, 3),)))] * 4
    changed = apply_controls(torch.zeros(4, 5), rows, [(1, 2), (2, 1, 2), (2,), (1, 2, 0)])
    assert changed.isinf().nonzero().tolist() == [[0, 3], [1, 3]]


def test_words_are_banned_as_comparing_them_whole_says() -> None:
    draw = random.Random(next_seed())
    for _ in range(300):
        words = tuple(tuple(draw.choices(range(3), k=draw.randint(1, 4))) for _ in range(draw.randint(0, 5)))
        answer = tuple(draw.choices(range(3), k=draw.randint(0, 6)))
        one = row(LogitControls(bad_words=words), banned=(9,))
        ends = [word[-1] for word in words if len(word) == 1 or answer[-(len(word) - 1) :] == word[:-1]]
        assert banned_tokens(one, answer) == [9, *ends]
        pending = (*answer, PENDING_TOKEN)
        assert banned_tokens(one, pending) == [9, *(word[0] for word in words if len(word) == 1)]
        after = {ban for token in range(3) for ban in _bans_if(words, answer, token)}
        assert set(bans_after(one, pending)) == after


def _bans_if(words: tuple[tuple[int, ...], ...], answer: tuple[int, ...], token: int) -> list[tuple[int, int]]:
    """Return (token, banned) for the words of several tokens that `token` after the answer makes end."""
    whole = (*answer, token)
    return [(token, word[-1]) for word in words if len(word) > 1 and whole[-(len(word) - 1) :] == word[:-1]]


class Word(tuple[int, ...]):
    """Counts how often it is copied to be compared."""

    num_copied = 0

    def __getitem__(self, key: Any) -> Any:
        Word.num_copied += isinstance(key, slice)
        return super().__getitem__(key)


def test_a_word_is_compared_whole_only_where_its_last_token_stands() -> None:
    """Regression: 256 long words took three milliseconds for each row of each step, and all answers of the step waited
    for them."""
    words = tuple(Word((*range(100), number, 7)) for number in range(100, 400))
    one = row(LogitControls(bad_words=words))
    answer = (*range(100), 250)
    assert banned_tokens(one, answer) == [7]
    assert bans_after(one, (*answer[:-1], PENDING_TOKEN)) == [(number, 7) for number in range(100, 400)]
    Word.num_copied = 0
    assert banned_tokens(one, (*answer, 5)) == []
    assert bans_after(one, (*answer, PENDING_TOKEN)) == []
    assert Word.num_copied == 0


# --- the seam -------------------------------------------------------------------------------------------------------


def answers_of(core: RecordingCore, request_id: str) -> list[tuple[int, ...]]:
    rows = rows_of(core, request_id)
    assert all(not row.answer for row in rows if row.kind is RowKind.MIDDLE)
    return [row.answer for row in rows if row.sampling is not None]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_whose_penalties_look_back_carries_the_answer_so_far(overlap: bool) -> None:
    core = RecordingCore(
        overlap=overlap, reply=(7, 8, 9, 7), max_num_seqs=2, max_num_batched_tokens=4, max_prefill_tokens=4
    )
    core.send("a", tuple(range(1, 10)), max_tokens=4, ignore_eos=True, **PENALTIES)
    core.run()
    whole = [(), (7,), (7, 8), (7, 8, 9)]
    assert answers_of(core, "a") == [(*part[:-1], PENDING_TOKEN) if overlap and part else part for part in whole]


@pytest.mark.parametrize("controls", [{}, {"logit_bias": ((3, 1.0),)}, {"bad_words": ((3,),)}])
def test_a_row_that_does_not_look_back_carries_no_answer(controls: dict[str, Any]) -> None:
    core = RecordingCore()
    core.send("a", (1, 2, 3), max_tokens=4, ignore_eos=True, **controls)
    core.run()
    assert set(answers_of(core, "a")) == {()}


def test_the_answer_is_the_same_after_a_preemption() -> None:
    """After a preemption, the sampled tokens are computed again as if they were part of the prompt.
    For penalties they are still the answer."""
    policy = SchedulerConfig(reserve_mode="prompt", preempt_policy="lifo", watermark_blocks=0)
    core = RecordingCore(num_kv_blocks=5, max_num_seqs=2, scheduler=policy, enable_prefix_caching=False)
    for name in "ab":
        core.send(name, (1, 2, 3, 4, 5, 6, 7), max_tokens=10, ignore_eos=True, presence_penalty=1.0)
    core.run()
    assert core.load().num_preemptions
    for name in "ab":
        answer = tuple(event.token_id for event in core.events[name] if hasattr(event, "token_id"))
        assert answers_of(core, name) == [answer[:count] for count in range(10)]


def test_an_answer_that_another_engine_began_goes_on_from_there() -> None:
    submission = Submission("a", (1, 2, 3, 4), SamplingParams(max_tokens=3, presence_penalty=1.0), num_answer_tokens=2)
    request = create_request(submission, resolved_config(), 0)
    request.token_ids.append(9)
    assert request.answer() == (3, 4, 9)


# --- what is refused ------------------------------------------------------------------------------------------------

EVERY = tuple(range(VOCAB))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ((1, -1),)}, "bad_words"),
        ({"bad_words": tuple((token,) for token in EVERY)}, "allowed_token_ids"),
        ({"allowed_token_ids": (5, 6), "bad_words": ((5,), (6,))}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "allowed_token_ids"),
        ({"stop_token_ids": EVERY, "min_tokens": 1}, "stop_token_ids"),
    ],
)
def test_what_no_engine_could_sample_is_refused_with_its_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        create_request(Submission("a", (1, 2), SamplingParams(**{"max_tokens": 4, **asked})), resolved_config(), 0)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("count", [-1, 3])
def test_the_answer_is_within_the_prompt(count: int) -> None:
    with pytest.raises(RequestRejected, match="num_answer_tokens must be in 0 to 2"):
        Submission("a", (1, 2), SamplingParams(), num_answer_tokens=count)


@pytest.mark.parametrize("asked", [{"allowed_token_ids": (5, 6)}, {"bad_words": ((5,),), "allowed_token_ids": (5, 6)}])
def test_the_scripted_engine_samples_what_is_allowed(asked: dict[str, Any]) -> None:
    core = RecordingCore()
    core.send("a", (1, 2, 3), max_tokens=20, ignore_eos=True, **asked)
    core.run()
    sampled = {event.token_id for event in core.events["a"] if hasattr(event, "token_id")}
    assert sampled == ({6} if "bad_words" in asked else {5, 6})
