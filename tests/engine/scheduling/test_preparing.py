"""Contracts of requests whose prompt is still being made: they keep their place, block nobody, and end like any other.
The specification's S5-B17, and the defects S5-R20 and S5-R21."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.protocol import ErrorCode, Failed, FinishReason, Scheduled
from tests.support.engines import RecordingCore, answer_alone

PROMPT = list(range(1, 20))


def core_of(loop: str = "plain", **overrides: Any) -> RecordingCore:
    return RecordingCore(overlap=loop == "overlap", **overrides)


def order_of(core: RecordingCore) -> list[str]:
    """Return the requests in the order of their first rows."""
    return list(dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows))


def check_nothing_is_left(core: RecordingCore) -> None:
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_preparing, load.num_held_blocks) == (0, 0, 0, 0)
    assert load.num_queued_tokens == 0
    assert not core.has_work
    assert not core._scheduler.waiting.num_tenants, "its tenant is not counted as present for ever"


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_request_that_is_being_prepared_does_not_run_and_is_no_work(loop: str) -> None:
    core = core_of(loop)
    core.send("late", PROMPT, max_tokens=4, prepared=False)
    assert not core.has_work, "nobody steps an engine that only waits for prompts"
    assert core.step() == []
    assert core.plans == []
    load = core.load()
    assert (load.num_waiting, load.num_preparing, load.num_running) == (1, 1, 0)
    assert load.wait_reason is None, "no step has refused it"
    core.keep(core.prepared("late"))
    assert core.has_work
    assert (core.load().num_waiting, core.load().num_preparing) == (1, 0)
    core.run()
    assert core.tokens("late") == answer_alone(PROMPT, max_tokens=4)
    check_nothing_is_left(core)


def test_tokens_of_a_request_count_as_queued_once_it_is_prepared() -> None:
    core = core_of()
    core.send("late", PROMPT, max_tokens=4, prepared=False)
    assert core.load().num_queued_tokens == 0
    core.keep(core.prepared("late"))
    assert core.load().num_queued_tokens == len(PROMPT)
    core.run()
    check_nothing_is_left(core)


def test_others_run_while_a_request_is_prepared() -> None:
    """S5-B17: a request at the head whose image was still being decoded held up everyone."""
    core = core_of()
    core.send("late", PROMPT, max_tokens=4, prepared=False)
    core.send("other", PROMPT[:5], max_tokens=4, ignore_eos=True)
    core.run()
    assert core.tokens("other") == answer_alone(PROMPT[:5], max_tokens=4, ignore_eos=True)
    assert core.load().num_preparing == 1
    assert "late" not in core.events


@pytest.mark.parametrize("loop", ["plain", "overlap"])
def test_a_request_that_is_prepared_keeps_its_place_although_later_ones_ran_first(loop: str) -> None:
    """S5-R20: a request that was skipped went to the end of the queue, again and again."""
    core = core_of(loop, max_num_seqs=1)
    core.send("late", PROMPT, max_tokens=2, prepared=False)
    for name in ("first", "second", "third"):
        core.send(name, PROMPT, max_tokens=2)
    core.keep(core.step())
    core.keep(core.prepared("late"))
    assert core.waiting == ["late", "second", "third"]
    core.run()
    assert order_of(core) == ["first", "late", "second", "third"]


def test_a_request_that_is_prepared_has_its_place_among_its_priority_and_tenant() -> None:
    core = core_of(max_num_seqs=1)
    core.send("late", PROMPT, max_tokens=2, prepared=False, priority=1)
    core.send("urgent", PROMPT, max_tokens=2, priority=0)
    core.send("equal", PROMPT, max_tokens=2, priority=1)
    core.keep(core.prepared("late"))
    core.run()
    assert order_of(core) == ["urgent", "late", "equal"]


def test_requests_that_are_prepared_in_any_order_run_in_that_of_their_arrival() -> None:
    core = core_of(max_num_seqs=1)
    for name in "abcd":
        core.send(name, PROMPT, max_tokens=1, prepared=False)
    for name in "cadb":
        core.keep(core.prepared(name))
    core.run()
    assert order_of(core) == list("abcd")


def test_the_deadline_of_the_queue_counts_from_its_arrival() -> None:
    core = core_of(tick_ms=100, max_num_seqs=1)
    core.send("busy", PROMPT, max_tokens=20, ignore_eos=True)
    core.send("late", PROMPT, max_tokens=2, prepared=False, queue_timeout_s=0.55)
    for _ in range(4):
        core.keep(core.step())
    core.keep(core.prepared("late"))
    for _ in range(2):
        core.keep(core.step())
    end = core.events["late"][-1]
    assert isinstance(end, Failed)
    assert end.code is ErrorCode.DEADLINE_EXCEEDED


def test_preparing_twice_or_after_the_end_is_no_error() -> None:
    core = core_of()
    core.send("late", PROMPT, max_tokens=2, prepared=False)
    for _ in range(2):
        assert core.prepared("late") == []
    core.run()
    assert core.prepared("late") == core.prepared("unknown") == []
    assert core.fail("late", "too late") == core.fail("unknown", "too late") == []
    assert sum(isinstance(event, Scheduled) for event in core.events["late"]) == 1
    check_nothing_is_left(core)


# --- ends in that state ----------------------------------------------------------------------------------------------


def end_by_abort(core: RecordingCore) -> None:
    core.keep(core.abort("late"))
    assert core.finished("late").reason is FinishReason.ABORT
    assert core.finished("late").usage.completion_tokens == 0


def end_by_failure(core: RecordingCore) -> None:
    core.keep(core.fail("late", "The image cannot be read."))
    assert core.events["late"] == [Failed("late", ErrorCode.PREPARATION_FAILED, "The image cannot be read.")]


def end_by_deadline(core: RecordingCore) -> None:
    assert core.next_deadline == 5.0
    core.now = 5.0
    core.keep(core.step())
    (end,) = core.events["late"]
    assert isinstance(end, Failed)
    assert end.code is ErrorCode.DEADLINE_EXCEEDED
    assert "5.0 s" in end.message


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("timeout", ["timeout_s", "queue_timeout_s"])
@pytest.mark.parametrize("end", [end_by_abort, end_by_failure, end_by_deadline])
def test_a_request_that_ends_while_it_is_prepared_ends_once_and_leaves_nothing(
    end: Any, timeout: str, loop: str
) -> None:
    """S5-R20, S5-R21: a failed preparation left the id in a map,
    and an abort of a waiting request was ignored with a log line."""
    core = core_of(loop)
    core.send("late", PROMPT, max_tokens=2, prepared=False, tenant="t", **{timeout: 5.0})
    end(core)
    assert len(core.events["late"]) == 1
    assert core.prepared("late") == [], "a prompt that still arrives is dropped"
    core.run()
    assert core.step() == []
    assert core.plans == []
    check_nothing_is_left(core)
    core.events.clear()
    core.send("late", PROMPT, max_tokens=2)  # the id is free again
    core.run()
    assert core.tokens("late") == answer_alone(PROMPT, max_tokens=2)
    check_nothing_is_left(core)


def test_the_end_of_a_request_that_is_prepared_does_not_disturb_what_runs() -> None:
    core = core_of()
    core.send("late", PROMPT, max_tokens=2, prepared=False)
    core.send("other", PROMPT[:5], max_tokens=9, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    core.keep(core.fail("late", "The image cannot be read."))
    core.run()
    assert core.tokens("other") == answer_alone(PROMPT[:5], max_tokens=9, ignore_eos=True)
    check_nothing_is_left(core)


def test_the_ratio_starts_over_when_nothing_is_left_but_what_is_being_prepared() -> None:
    """I-16: a request that is being prepared holds no memory and asks for none, so the engine is idle."""
    core = core_of(scheduler=SchedulerConfig(ratio_decay_steps=3))
    core.send("late", PROMPT, max_tokens=2, prepared=False)
    core.send("other", PROMPT[:5], max_tokens=9, ignore_eos=True)
    core.keep(core.step())
    core.keep(core.step())
    assert core.load().reserve_ratio < 0.7
    core.run()
    assert core.load().reserve_ratio == 0.7
    assert core.load().num_preparing == 1
