"""Contracts of pooled hidden states: one vector for each prompt, the same in whatever way the prompt is computed.
The scripted executor's states are a hash of the prefix; tests/golden compares the model's with transformers'."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from engine.config import SchedulerConfig
from engine.fake.executor import HIDDEN_SIZE
from engine.protocol import Failed, Finished, Pooled, RequestRejected, SamplingParams, Scheduled, Submission, Token
from engine.step import ExecutorOutOfMemoryError, ScheduledRequest, StepPlan
from tests.support.engines import RecordingCore
from tests.support.plan_rows import rows_of

PROMPT = list(range(1, 20))
How = Literal["mean", "last"]


def vectors_of(core: RecordingCore, request_id: str) -> list[tuple[float, ...]]:
    return [event.values for event in core.events[request_id] if isinstance(event, Pooled)]


def alone(prompt: list[int], pooling: How) -> tuple[float, ...]:
    """Return the vector of one request that runs alone, unchunked, without a prefix cache."""
    core = RecordingCore(max_num_batched_tokens=256, max_prefill_tokens=256, enable_prefix_caching=False)
    core.send("alone", prompt, max_tokens=0, pooling=pooling)
    core.run()
    assert len(core.plans) == 1
    return vectors_of(core, "alone")[0]


def test_the_mean_is_that_of_all_positions_and_the_last_is_that_of_the_last() -> None:
    lasts = [alone(PROMPT[:length], "last") for length in (1, 2, 3)]
    mean = tuple(sum(column) / 3 for column in zip(*lasts, strict=True))
    assert alone(PROMPT[:3], "mean") == pytest.approx(mean)
    assert len(mean) == HIDDEN_SIZE
    assert len(set(lasts)) == 3


def test_a_model_without_an_lm_head_pools_prompts_and_answers_none() -> None:
    core = RecordingCore(headless=True)
    for params in ({"max_tokens": 5}, {"max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": 1}):
        with pytest.raises(RequestRejected, match=r"no LM head: it makes embeddings alone"):
            core.send("answered", PROMPT, **params)
    core.send("pooled", PROMPT, max_tokens=0, pooling="mean")
    core.run()
    assert vectors_of(core, "pooled") == [pytest.approx(alone(PROMPT, "mean"))]


@pytest.mark.parametrize("loop", [{}, {"overlap": True}, {"num_speculative_tokens": 3}, {"recurrent_state": True}])
@pytest.mark.parametrize("budget", [1, 2, 5, 18, 19, 64])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_the_same_for_every_budget_and_loop_and_is_sent_once(
    pooling: How, budget: int, loop: dict[str, Any]
) -> None:
    core = RecordingCore(
        max_num_batched_tokens=64, max_prefill_tokens=budget, scheduler=SchedulerConfig(chunk_align=1), **loop
    )
    core.send("neighbour", [3] * 6, max_tokens=20, ignore_eos=True)
    core.send("a", PROMPT, max_tokens=0, pooling=pooling)
    core.send("b", PROMPT[:7], max_tokens=0, pooling="last")
    core.run()
    (vector,) = vectors_of(core, "a")
    assert vector == pytest.approx(alone(PROMPT, pooling))
    assert vectors_of(core, "b") == [pytest.approx(alone(PROMPT[:7], "last"))]
    assert [type(event) for event in core.events["a"]] == [Scheduled, Pooled, Finished]
    usage = core.finished("a").usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 0)
    assert not [event for event in core.events["a"] if isinstance(event, Token)]


@pytest.mark.parametrize(
    "owner", [dict(chunk_owner="engine"), dict(chunk_boundary="request_local", max_partial_prefills=0)]
)
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_the_same_whoever_cuts_the_prompt(owner: dict[str, Any], pooling: How) -> None:
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=5, scheduler=SchedulerConfig(**owner))
    core.send("a", PROMPT, max_tokens=0, pooling=pooling)
    core.run()
    assert vectors_of(core, "a") == [pytest.approx(alone(PROMPT, pooling))]


def test_a_mean_takes_no_cached_prefix_whose_states_nobody_kept_and_leaves_one_to_others() -> None:
    core = RecordingCore()
    for name, pooling in (("a", "mean"), ("b", "mean"), ("c", "last")):
        core.send(name, PROMPT, max_tokens=0, pooling=pooling)
        core.run()
    assert vectors_of(core, "b") == vectors_of(core, "a") == [pytest.approx(alone(PROMPT, "mean"))]
    assert vectors_of(core, "c") == [pytest.approx(alone(PROMPT, "last"))]
    assert core.finished("b").usage.cached_tokens == 0
    assert core.finished("c").usage.cached_tokens == 16


def test_what_was_summed_before_a_preemption_is_not_summed_again() -> None:
    """A preempted prompt starts from the blocks that it left in the prefix cache, or from its beginning."""
    core = RecordingCore(
        num_kv_blocks=7,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_prefill_tokens=1,
        scheduler=SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo", chunk_align=1),
    )
    core.send("old", [5, 6, 7], max_tokens=24, ignore_eos=True)
    core.step()
    core.send("a", PROMPT, max_tokens=0, pooling="mean")
    core.run()
    rows = rows_of(core, "a")
    assert core.load().num_preemptions > 0
    assert sum(len(row.token_ids) for row in rows) > len(PROMPT), "some of it is computed twice"
    assert vectors_of(core, "a") == [pytest.approx(alone(PROMPT, "mean"))]


def test_a_step_that_ran_out_of_memory_is_summed_once() -> None:
    failures = iter([True])

    def run_out(plan: StepPlan) -> None:
        if next(failures, False):
            raise ExecutorOutOfMemoryError("scripted")

    core = RecordingCore(max_prefill_tokens=16, before_step=run_out)
    core.send("a", PROMPT, max_tokens=0, pooling="mean")
    core.run()
    assert vectors_of(core, "a") == [pytest.approx(alone(PROMPT, "mean"))]


def test_a_row_that_fails_sends_no_vector_and_its_neighbour_gets_its_own() -> None:
    def failing(row: ScheduledRequest) -> str | None:
        return "scripted" if row.request_id == "a" and row.start else None

    core = RecordingCore(max_prefill_tokens=10, failing=failing)
    core.send("a", PROMPT, max_tokens=0, pooling="mean")
    core.send("b", PROMPT[:9], max_tokens=0, pooling="mean")
    core.run()
    assert vectors_of(core, "a") == []
    assert isinstance(core.events["a"][-1], Failed)
    assert vectors_of(core, "b") == [pytest.approx(alone(PROMPT[:9], "mean"))]


def test_a_request_that_is_pooled_has_no_answer() -> None:
    with pytest.raises(RequestRejected, match="max_tokens must be 0 where the prompt is pooled, but it is 1"):
        Submission("a", (1, 2), SamplingParams(max_tokens=1), pooling="mean")
