"""Contracts of the prefill limit after steps ran out of device memory: how fast it falls, and that it comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import SchedulerConfig
from engine.protocol import Failed, FinishReason
from engine.scheduling.prefill_limit import PATIENCE, PrefillLimit
from engine.step import ExecutorOutOfMemoryError, StepPlan
from tests.support.engines import RecordingCore, answer_alone
from tests.support.plan_rows import chunks_of

BUDGET = 2048


def large_core(before_step: Callable[[StepPlan], None]) -> RecordingCore:
    return RecordingCore(
        before_step=before_step,
        block_size=16,
        max_model_len=80_000,
        num_kv_blocks=8000,
        max_num_batched_tokens=BUDGET + 8,
        max_prefill_tokens=BUDGET,
        enable_prefix_caching=False,
        scheduler=SchedulerConfig(),
    )


def failing_times(times: int) -> Callable[[StepPlan], None]:
    left = times

    def check(plan: StepPlan) -> None:
        nonlocal left
        if left:
            left -= 1
            raise ExecutorOutOfMemoryError("injected")

    return check


def failing_above(tokens: int) -> Callable[[StepPlan], None]:
    def check(plan: StepPlan) -> None:
        if plan.num_tokens > tokens:
            raise ExecutorOutOfMemoryError("injected")

    return check


def tokens_of(core: RecordingCore, request_id: str) -> list[int]:
    """Return the lengths of the chunks of a prompt."""
    return chunks_of(core, request_id)


def test_a_prompt_of_4096_tokens_takes_four_steps_at_most_after_a_small_step_ran_out_of_memory() -> None:
    """Regression: a chunk of 40 tokens cut the limit from 2,048 to 20, and the next prompt took 206 steps,
    until the engine was idle."""
    core = large_core(failing_times(1))
    core.send("stream", [1] * 40, max_tokens=60, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    core.send("long", [2] * 4096, max_tokens=1)
    core.run()
    assert tokens_of(core, "stream") == [40, 16, 24], "tried again with half of what failed, to a block's end"
    assert len(tokens_of(core, "long")) <= 4
    assert core.tokens("stream") == answer_alone([1] * 40, max_tokens=60, ignore_eos=True)


def test_a_prompt_whose_own_first_chunk_ran_out_of_memory_takes_four_steps_and_the_failed_one() -> None:
    core = large_core(failing_times(1))
    core.send("long", [2] * 4096, max_tokens=1)
    core.run()
    assert tokens_of(core, "long")[:2] == [2048, 1024]
    assert len(tokens_of(core, "long")) <= 1 + 4


def test_steps_are_as_large_as_before_a_while_after_a_shortage_that_is_over() -> None:
    core = large_core(failing_times(1))
    core.send("stream", [1] * 40, max_tokens=300, ignore_eos=True)
    core.send("long", [2] * 75_000, max_tokens=1)
    core.run()
    chunks = tokens_of(core, "long")
    assert 0 < chunks.index(2048, 1) < 2 * PATIENCE
    assert set(chunks[chunks.index(2048, 1) : -1]) == {2048}


def test_a_shortage_that_lasts_costs_one_step_in_many_and_no_request_after_the_first() -> None:
    """A limit that grew back into the shortage at once would fail every few steps."""
    core = large_core(failing_above(1500))
    core.send("stream", [1] * 4, max_tokens=300, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [2] * 75_000, max_tokens=1)
    core.run()
    failed = [plan for plan in core.plans if plan.num_tokens > 1500]
    assert 1 < len(failed) <= 1 + len(core.plans) // PATIENCE
    assert core.finished("long").reason is FinishReason.LENGTH


def test_a_shortage_below_half_costs_one_lone_request_and_not_each_that_comes_after_an_idle_time() -> None:
    core = large_core(failing_above(700))
    for name in ("first", "second", "third"):
        core.send(name, [2] * 3000, max_tokens=1)
        core.run()
    assert isinstance(core.events["first"][-1], Failed)
    assert core.finished("second").reason is core.finished("third").reason is FinishReason.LENGTH


def test_decode_rows_that_run_out_of_memory_change_no_limit() -> None:
    fail = False

    def check(plan: StepPlan) -> None:
        if fail:
            raise ExecutorOutOfMemoryError("injected")

    core = large_core(check)
    core.send("stream", [1] * 40, max_tokens=60, ignore_eos=True)
    core.keep(core.step())
    core.send("late", [3] * 4, max_tokens=1, prepared=False)  # so that the engine is not idle in between
    fail = True
    core.keep(core.step())
    fail = False
    assert isinstance(core.events["stream"][-1], Failed)
    core.send("long", [2] * 4096, max_tokens=1)
    core.keep(core.prepared("late"))
    core.run()
    assert tokens_of(core, "long")[0] == 2048 - 16, "beside the four tokens of the other, to a block's end"


@pytest.mark.parametrize("block_size", [16, 64])
def test_the_limit_never_falls_below_a_block_nor_grows_above_what_was_set(block_size: int) -> None:
    limit = PrefillLimit(2048, block_size)
    for _ in range(20):
        limit.ran_out(40, again=True)
        assert limit.value >= block_size
    limit.begin()
    for _ in range(2 * PATIENCE + 20):
        limit.went_well(limit.value)
        assert limit.value <= 2048
    assert limit.is_whole


def test_steps_that_have_no_use_for_more_tell_nothing() -> None:
    limit = PrefillLimit(2048, 16)
    limit.ran_out(2048, again=False)
    limit.begin()
    for _ in range(500):
        limit.went_well(100)
    assert limit.value == 1024
