"""Contracts of log-probabilities through the core: those of prompts, chunk by chunk and sent once, and those of sampled
tokens.
The specification's I-14, S3-B3 to S3-B6, and the defects S3-R2, S3-R3 and S3-R7."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.protocol import (
    ErrorCode,
    Failed,
    FinishReason,
    PromptLogprobs,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Submission,
    Token,
    TokenLogprobs,
)
from engine.scheduling.request import create_request
from engine.step import ExecutorOutOfMemoryError, RowKind, StepPlan
from tests.support.engines import EOS, RecordingCore, answer_alone, resolved_config
from tests.support.oracle import logprobs_of, prompt_logprobs_of
from tests.support.plan_rows import rows_of

PROMPT = list(range(1, 20))
EXPECTED = prompt_logprobs_of(PROMPT, 2)


def scores_of(core: RecordingCore, request_id: str) -> list[tuple[TokenLogprobs, ...]]:
    return [event.logprobs for event in core.events[request_id] if isinstance(event, PromptLogprobs)]


def scored_alone(prompt: list[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of one request that runs alone, unchunked, without a prefix cache."""
    core = RecordingCore(
        max_num_batched_tokens=10_000, max_prefill_tokens=10_000, enable_prefix_caching=False, num_kv_blocks=256
    )
    core.send("alone", prompt, max_tokens=0, prompt_logprobs=count)
    core.run()
    assert len(core.plans) == 1
    return scores_of(core, "alone")[0]


# --- the prompt's: every token but the first, once, whatever the chunks ----------------------------------------------


def test_a_request_alone_and_unchunked_gets_what_the_distribution_says() -> None:
    assert scored_alone(PROMPT, 2) == EXPECTED
    assert len(EXPECTED) == len(PROMPT) - 1
    assert [entry.token_id for entry in EXPECTED] == PROMPT[1:]


@pytest.mark.parametrize("loop", [{}, {"overlap": True}, {"num_speculative_tokens": 3}, {"recurrent_state": True}])
@pytest.mark.parametrize("budget", [1, 2, 4, 5, 18, 19, 64])
def test_prompt_logprobs_are_the_same_for_every_budget_and_loop(budget: int, loop: dict[str, Any]) -> None:
    """S3-R2: the first token of a chunk got a log-probability that was off by one, or none."""
    scheduler = SchedulerConfig(chunk_align=1)
    core = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=budget, scheduler=scheduler, **loop)
    core.send("neighbour", [3] * 6, max_tokens=20, ignore_eos=True)
    core.send("a", PROMPT, max_tokens=6, prompt_logprobs=2, ignore_eos=True)
    core.send("b", PROMPT[:7], max_tokens=6, prompt_logprobs=0)
    core.run()
    assert scores_of(core, "a") == [EXPECTED]
    assert scores_of(core, "b") == [prompt_logprobs_of(PROMPT[:7], 0)]
    assert scores_of(core, "neighbour") == []
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    "owner", [dict(chunk_owner="engine"), dict(chunk_boundary="request_local", max_partial_prefills=0)]
)
@pytest.mark.parametrize("mode", ["mixed", "dedicated"])
def test_prompt_logprobs_are_the_same_whoever_cuts_the_prompt(owner: dict[str, Any], mode: Any) -> None:
    scheduler = SchedulerConfig(prompt_logprobs_step=mode, **owner)
    core = RecordingCore(max_num_batched_tokens=12, max_prefill_tokens=5, scheduler=scheduler)
    for name in "ab":
        core.send(name, PROMPT, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    core.run()
    for name in "ab":
        assert scores_of(core, name) == [EXPECTED]
        assert core.tokens(name) == answer_alone(PROMPT, max_tokens=4, ignore_eos=True)


def test_prompt_logprobs_come_in_one_event_after_scheduled_and_before_the_first_token() -> None:
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4)
    core.send("a", PROMPT, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    for _ in range(4):
        core.keep(core.step())
    assert core.events["a"] == [Scheduled("a", 0)], "nothing is emitted for chunks in the middle"
    core.run()
    kinds = [type(event).__name__ for event in core.events["a"]]
    assert kinds == ["Scheduled", "PromptLogprobs", "Token", "Token", "Finished"]


def test_each_position_is_scored_by_one_chunk_and_the_last_scores_nothing() -> None:
    """The last position predicts the first sampled token, which is no prompt token."""
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4)
    core.send("a", PROMPT, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    core.run()
    scorings = [row.scoring for row in rows_of(core, "a") if row.scoring]
    covered = [(scoring.first + i + 1, token) for scoring in scorings for i, token in enumerate(scoring.token_ids)]
    assert covered == list(enumerate(PROMPT))[1:]
    assert not any(row.scoring for row in rows_of(core, "a") if row.kind is RowKind.DECODE)


def test_a_chunk_of_only_the_last_token_scores_nothing_and_still_completes_the_prompt() -> None:
    core = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=18, scheduler=SchedulerConfig(chunk_align=1))
    core.send("a", PROMPT, max_tokens=1, prompt_logprobs=2)
    core.run()
    assert [(row.start, row.scoring is None) for row in rows_of(core, "a")] == [(0, False), (18, True)]
    assert scores_of(core, "a") == [EXPECTED]


def test_a_request_that_does_not_ask_is_not_scored() -> None:
    """S3-B3: logits of all positions are computed only where a request asked for them."""
    core = RecordingCore()
    core.send("a", PROMPT, max_tokens=3, logprobs=2)
    core.send("b", PROMPT, max_tokens=0)
    core.run()
    assert not any(row.scoring for plan in core.plans for row in plan.rows)
    assert scores_of(core, "a") == scores_of(core, "b") == []


# --- prefix hits -----------------------------------------------------------------------------------------------------


def test_positions_that_must_be_scored_are_computed_although_they_are_cached() -> None:
    """S3-R7: a prefix hit skips the forward that the log-probabilities come from."""
    core = RecordingCore()
    core.send("first", PROMPT, max_tokens=1)
    core.run()
    core.send("scored", PROMPT, max_tokens=3, prompt_logprobs=2)
    core.send("plain", PROMPT, max_tokens=3)
    core.run()
    assert scores_of(core, "scored") == [EXPECTED]
    assert core.finished("scored").usage.cached_tokens == 0
    assert core.finished("plain").usage.cached_tokens == 16
    assert core.tokens("scored") == core.tokens("plain")


def test_what_a_scored_prompt_computed_is_lent_to_others() -> None:
    core = RecordingCore()
    core.send("scored", PROMPT, max_tokens=0, prompt_logprobs=0)
    core.run()
    core.send("plain", PROMPT, max_tokens=1)
    core.run()
    assert core.finished("plain").usage.cached_tokens == 16


# --- preemption ------------------------------------------------------------------------------------------------------

# Memory runs out under a long answer that came first, so that the prompt, which came later, is the victim.
TIGHT: dict[str, Any] = dict(
    num_kv_blocks=12,
    max_num_batched_tokens=9,
    max_prefill_tokens=4,
    max_num_seqs=2,
    scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo"),
)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("head_start", range(2, 28, 3))
def test_prompt_logprobs_are_sent_once_and_whole_after_a_preemption_at_any_moment(
    head_start: int, overlap: bool
) -> None:
    core = RecordingCore(**TIGHT, overlap=overlap)
    core.send("elder", [3] * 4, max_tokens=40, ignore_eos=True)
    for _ in range(head_start):
        core.keep(core.step())
    core.send("a", PROMPT, max_tokens=9, prompt_logprobs=2, ignore_eos=True)
    core.run()
    assert scores_of(core, "a") == [EXPECTED]
    kinds = [type(event).__name__ for event in core.events["a"]]
    assert kinds == ["Scheduled", "PromptLogprobs", *["Token"] * 9, "Finished"]
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=9, ignore_eos=True)
    assert core.tokens("elder") == answer_alone([3] * 4, max_tokens=40, ignore_eos=True)


def preempt_and_run(core: RecordingCore, num_scored: int) -> None:
    """Preempt the request "a" once so many of its positions are scored, and run to the end."""
    request = core._scheduler.find("a")
    assert request is not None
    assert request.scoring is not None
    assert len(request.scoring.logprobs) == num_scored
    core._scheduler._preempt(request, core.now)
    core._executor.forget(["a"])
    core.run()


def test_a_prompt_that_is_preempted_in_the_middle_goes_on_from_what_is_scored() -> None:
    core = RecordingCore(**{**TIGHT, "num_kv_blocks": 30})
    core.send("elder", [3] * 4, max_tokens=90, ignore_eos=True)
    core.keep(core.step())
    core.send("a", PROMPT, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    preempt_and_run(core, num_scored=12)
    starts = [row.start for row in rows_of(core, "a")]
    assert starts[:4] == [0, 4, 8, 12], "12 positions are scored: their blocks may be hit now"
    assert scores_of(core, "a") == [EXPECTED]
    assert core.finished("a").usage.cached_tokens == 0, "as the client was told at first"


def test_a_hit_does_not_reach_beyond_what_is_scored_after_a_preemption() -> None:
    core = RecordingCore(**{**TIGHT, "num_kv_blocks": 30, "max_num_seqs": 3})
    core.send("twin", PROMPT, max_tokens=60, ignore_eos=True)  # the whole prompt is cached
    for _ in range(6):
        core.keep(core.step())
    core.send("a", PROMPT, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    for _ in range(2):
        core.keep(core.step())
    preempt_and_run(core, num_scored=8)
    again = [row.start for row in rows_of(core, "a")][2]
    assert again <= 8
    assert scores_of(core, "a") == [EXPECTED]


def test_prompt_logprobs_are_not_sent_again_after_a_preemption_of_the_answer() -> None:
    core = RecordingCore(**{**TIGHT, "max_prefill_tokens": 9})
    core.send("elder", [3] * 4, max_tokens=40, ignore_eos=True)
    core.send("a", PROMPT, max_tokens=20, prompt_logprobs=2, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    completed = [row for row in rows_of(core, "a") if row.kind is RowKind.LAST]
    assert len(completed) > 1, "it was preempted after it had begun to answer"
    assert not any(row.scoring for row in completed[1:]), "nor computed again"
    assert scores_of(core, "a") == [EXPECTED]


def test_a_chunk_that_ran_out_of_memory_is_scored_once() -> None:
    ran_out = False

    def check(plan: StepPlan) -> None:
        nonlocal ran_out
        if len(core.plans) == 2 and not ran_out:
            ran_out = True
            raise ExecutorOutOfMemoryError("injected")

    core = RecordingCore(before_step=check, max_num_batched_tokens=9, max_prefill_tokens=8)
    core.send("a", PROMPT, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    core.run()
    assert scores_of(core, "a") == [EXPECTED]


# --- ends in the middle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_in_the_middle_of_the_prompt_sends_nothing_and_keeps_nothing(steps: int, overlap: bool) -> None:
    """S3-R3: the scores of an aborted prompt were kept for ever, and went to the next request of that id."""
    core = RecordingCore(max_num_batched_tokens=9, max_prefill_tokens=4, overlap=overlap)
    core.send("a", PROMPT, max_tokens=2, prompt_logprobs=2)
    for _ in range(steps):
        core.keep(core.step())
    core.keep(core.abort("a"))
    assert core.finished("a").reason is FinishReason.ABORT
    assert scores_of(core, "a") == []
    core.events.clear()
    other = [5, 6, 7, 8, 9, 10]
    core.send("a", other, max_tokens=2, prompt_logprobs=1)
    core.run()
    assert scores_of(core, "a") == [prompt_logprobs_of(other, 1)]


def test_a_failed_chunk_sends_nothing() -> None:
    core = RecordingCore(
        failing=lambda row: "fault" if row.start == 8 else None, max_num_batched_tokens=9, max_prefill_tokens=4
    )
    core.send("a", PROMPT, max_tokens=2, prompt_logprobs=2)
    core.run()
    assert core.events["a"] == [Scheduled("a", 0), Failed("a", ErrorCode.STEP_FAILED, "fault")]


# --- max_tokens 0 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [4, 64])
def test_max_tokens_0_computes_the_prompt_and_ends_by_length(budget: int, overlap: bool) -> None:
    core = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=budget, overlap=overlap)
    core.send("a", PROMPT, max_tokens=0, prompt_logprobs=2)
    core.run()
    end = core.finished("a")
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == (FinishReason.LENGTH, len(PROMPT), 0)
    assert end.stop_token_id is None
    assert [type(event).__name__ for event in core.events["a"]] == ["Scheduled", "PromptLogprobs", "Finished"]
    assert all(row.sampling is None for row in rows_of(core, "a")), "nothing is sampled"
    assert rows_of(core, "a")[-1].kind is RowKind.LAST
    assert core.load().num_held_blocks == 0


def test_max_tokens_0_without_scores_only_caches_the_prompt() -> None:
    core = RecordingCore()
    core.send("a", PROMPT, max_tokens=0)
    core.run()
    assert [type(event).__name__ for event in core.events["a"]] == ["Scheduled", "Finished"]
    core.send("b", PROMPT, max_tokens=2)
    core.run()
    assert core.finished("b").usage.cached_tokens == 16


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_of_one_token_has_no_prediction(max_tokens: int) -> None:
    core = RecordingCore()
    core.send("a", [7], max_tokens=max_tokens, prompt_logprobs=2)
    core.run()
    assert scores_of(core, "a") == [()]


@pytest.mark.parametrize("overrides", [{}, {"num_kv_blocks": 5}], ids=["context", "pool"])
def test_the_longest_prompts_are_accepted_with_max_tokens_0_and_one_token_more_is_refused(
    overrides: dict[str, Any],
) -> None:
    """A prompt that is only scored needs no room for an answer. S3-R6: nothing that can never run may wait."""
    most = 20
    settings: dict[str, Any] = {"max_model_len": 64 if overrides else most, **overrides}
    core = RecordingCore(**settings)
    core.send("a", [1] * most, max_tokens=0, prompt_logprobs=0)
    core.run()
    assert core.finished("a").reason is FinishReason.LENGTH
    assert scores_of(core, "a") == [prompt_logprobs_of([1] * most, 0)]
    with pytest.raises(RequestRejected) as caught:
        create_request(Submission("r", (1,) * (most + 1), SamplingParams(max_tokens=0)), resolved_config(**settings), 0)
    error = caught.value
    expected = ErrorCode.KV_CAPACITY_EXCEEDED if overrides else ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert error.code is expected
    assert f"{most} tokens" in error.message, "the bound that was broken, and not one more"
    assert f"{most + 1}" in error.message
    if not overrides:  # with one token to sample, the context holds one token of prompt less
        with pytest.raises(RequestRejected):
            create_request(Submission("r", (1,) * most, SamplingParams(max_tokens=1)), resolved_config(**settings), 0)


def test_the_reply_begins_with_a_token_where_one_is_asked_for_after_the_longest_prompt() -> None:
    core = RecordingCore(max_model_len=20)
    core.send("a", [1] * 19, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    core.run()
    assert len(core.tokens("a")) == 1


# --- sampled tokens' -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loop",
    [{}, {"overlap": True}, {"num_speculative_tokens": 3, "max_num_batched_tokens": 64}, {"recurrent_state": True}],
)
@pytest.mark.parametrize("count", [None, 0, 2])
def test_each_token_carries_its_logprobs_exactly_where_they_were_asked_for(
    count: int | None, loop: dict[str, Any]
) -> None:
    core = RecordingCore(**loop)
    core.send("a", PROMPT, max_tokens=12, logprobs=count, ignore_eos=True)
    core.send("other", PROMPT[:4], max_tokens=12, logprobs=5, ignore_eos=True)
    core.run()
    for name, prompt, asked in (("a", PROMPT, count), ("other", PROMPT[:4], 5)):
        tokens = [event for event in core.events[name] if isinstance(event, Token)]
        assert len(tokens) == 12
        text = [*prompt, *core.tokens(name)]
        for i, token in enumerate(tokens, len(prompt)):
            assert token.logprobs == (None if asked is None else logprobs_of(text[:i], text[i], asked))


@pytest.mark.parametrize("loop", [{}, {"overlap": True}, {"num_speculative_tokens": 3, "max_num_batched_tokens": 64}])
@pytest.mark.parametrize("count", [None, 0, 2])
def test_the_stop_token_that_ends_an_answer_has_its_logprobs_where_they_were_asked_for(
    count: int | None, loop: dict[str, Any]
) -> None:
    core = RecordingCore(reply=[7, 8, 9], **loop)
    core.send("a", PROMPT, max_tokens=12, logprobs=count)
    core.run()
    end = core.finished("a")
    assert end.stop_token_id == EOS
    assert end.stop_logprobs == (None if count is None else logprobs_of([*PROMPT, 7, 8, 9], EOS, count))


def test_a_preemption_changes_no_tokens_logprobs() -> None:
    core = RecordingCore(**TIGHT)
    core.send("elder", [3] * 4, max_tokens=40, ignore_eos=True)
    core.send("a", PROMPT[:9], max_tokens=20, logprobs=1, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    text = [*PROMPT[:9], *core.tokens("a")]
    given = [event.logprobs for event in core.events["a"] if isinstance(event, Token)]
    assert given == [logprobs_of(text[:i], text[i], 1) for i in range(9, len(text))]
