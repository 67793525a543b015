"""Contracts of the overlap loop: its tokens are those of the plain loop. Long: every end and fault, with a step in
flight.
The specification's I-26, I-28 and I-33, and the pipelines that lost results in S4-R8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.protocol import ErrorCode, Failed, Finished, FinishReason, Scheduled, Token
from engine.scheduling.state_slots import RecurrentStates
from engine.step import (
    PENDING_TOKEN,
    ExecutorFatalError,
    ExecutorOutOfMemoryError,
    RowKind,
    StepOutput,
    StepPlan,
)
from tests.support.engines import EOS, RecordingCore, answer_alone, resource_of
from tests.support.plan_rows import rows_of

PROMPT = list(range(1, 20))
TIGHT = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0)


def overlapped(**overrides: Any) -> RecordingCore:
    return RecordingCore(overlap=True, **overrides)


def steps(core: RecordingCore, count: int) -> list[list[object]]:
    """Return what each of the next `count` steps returned."""
    return [list(core.keep(core.step())) for _ in range(count)]


def watch_results(core: RecordingCore, fail: Iterable[int] = ()) -> list[StepOutput]:
    """Watch every output as it is collected; the outputs of the steps in `fail` get lost."""
    outputs: list[StepOutput] = []
    collect, lost = core._executor.collect, set(fail)

    def watched() -> StepOutput:
        outputs.append(collect())
        if outputs[-1].step_id in lost:
            raise RuntimeError("lost on the way")
        return outputs[-1]

    core._executor.collect = watched  # type: ignore[method-assign]
    return outputs


def check_nothing_is_left(core: RecordingCore) -> None:
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_held_blocks, load.num_queued_tokens) == (0, 0, 0, 0)
    assert not core.has_work
    executor: Any = core._executor
    assert not executor._outputs, "every launched step is read back"
    assert not executor._newest, "the executor keeps nothing of any request"
    if core.config.recurrent_state:
        snapshots = resource_of(core, RecurrentStates).snapshots
        assert len(snapshots._free) + len(snapshots._slots) == core.config.scheduler.state_snapshots


# --- the same tokens as the plain loop -------------------------------------------------------------------------------

TRAFFIC: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "mixed": (
        dict(max_num_batched_tokens=12, max_prefill_tokens=7, max_num_seqs=4),
        [dict(prompt=PROMPT[: 3 + 2 * i], max_tokens=4 + i, temperature=i % 2, seed=i) for i in range(8)],
    ),
    "memory runs out": (
        dict(num_kv_blocks=24, block_size=2, scheduler=TIGHT),
        [dict(prompt=[1 + i] * (3 + i), max_tokens=30, ignore_eos=True) for i in range(5)],
    ),
    "prefix hits": (
        dict(max_num_seqs=2),
        [dict(prompt=[*PROMPT, i], max_tokens=6) for i in range(6)],
    ),
    "stop tokens": (
        dict(alphabet=[EOS, 1, 2, 3]),
        [dict(prompt=PROMPT[:i], max_tokens=40) for i in range(1, 9)],
    ),
    "one token each": (
        dict(max_num_seqs=2, max_num_batched_tokens=5, max_prefill_tokens=3),
        [dict(prompt=PROMPT[:i], max_tokens=1) for i in range(1, 7)],
    ),
    "a hybrid model": (
        dict(recurrent_state=True, max_num_seqs=3, scheduler=SchedulerConfig(state_snapshot_tokens=8)),
        [dict(prompt=[*PROMPT, i], max_tokens=5 + i) for i in range(6)],
    ),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_tokens_and_ends_are_those_of_the_plain_loop(name: str) -> None:
    overrides, requests = TRAFFIC[name]
    plain, overlap = RecordingCore(**overrides), overlapped(**overrides)
    for core in (plain, overlap):
        for i, request in enumerate(requests):
            core.send(f"r{i}", **request)
        core.run()
    for i in range(len(requests)):
        ends = [core.finished(f"r{i}") for core in (plain, overlap)]
        assert overlap.tokens(f"r{i}") == plain.tokens(f"r{i}")
        assert (ends[0].reason, ends[0].stop_token_id) == (ends[1].reason, ends[1].stop_token_id)
        assert ends[0].usage.completion_tokens == ends[1].usage.completion_tokens
    pending = [row for plan in overlap.plans for row in plan.rows if row.token_ids == (PENDING_TOKEN,)]
    assert pending or name == "one token each", "nothing was launched before the step before it was read back"
    assert (overlap.load().num_preemptions > 0) == (name == "memory runs out")
    if name in ("prefix hits", "a hybrid model"):
        assert overlap.finished("r5").usage.cached_tokens == 16
    check_nothing_is_left(overlap)


def test_results_arrive_exactly_one_step_after_their_launch() -> None:
    core = overlapped(reply=[5, 6, 7])
    core.send("a", PROMPT, max_tokens=3)
    assert steps(core, 2) == [[Scheduled("a", 0)], [Token("a", 5)]]
    assert len(core.plans) == 2, "the second step is launched by the time the first is read back"
    assert steps(core, 1) == [[Token("a", 6)]]
    (last,) = steps(core, 1)
    assert last[0] == Token("a", 7)
    assert isinstance(last[1], Finished)
    assert len(core.plans) == 3, "the last events came although there was nothing more to launch"


def test_there_is_work_until_the_last_step_is_read_back() -> None:
    core = overlapped()
    core.send("a", PROMPT, max_tokens=1)
    steps(core, 1)
    core.keep(core.abort("a"))
    assert core.load().num_running == 0
    assert core.has_work, "its row is still with the executor"
    assert steps(core, 1) == [[]]
    check_nothing_is_left(core)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_stop_tokens_are_banned_until_min_tokens_counting_those_in_flight() -> None:
    core = overlapped()
    core.send("a", PROMPT, max_tokens=8, min_tokens=3, stop_token_ids=(5,))
    core.run()
    banned = [row.sampling.banned_token_ids for row in rows_of(core, "a") if row.sampling]
    assert banned[:3] == [(EOS, 5)] * 3
    assert banned[3:]
    assert set(banned[3:]) == {()}
    plain = RecordingCore()
    plain.send("a", PROMPT, max_tokens=8, min_tokens=3, stop_token_ids=(5,))
    plain.run()
    assert core.finished("a") == plain.finished("a")


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_request_that_ends_by_length_is_never_launched_beyond_its_end(max_tokens: int) -> None:
    core = overlapped()
    core.send("long", [3], max_tokens=20, ignore_eos=True)
    core.send("a", PROMPT, max_tokens=max_tokens, ignore_eos=True)
    core.run()
    rows = rows_of(core, "a")
    assert [row.end for row in rows] == [len(PROMPT) + i for i in range(max_tokens)]
    assert len(core.tokens("a")) == max_tokens


def test_after_a_stop_token_one_row_is_executed_and_its_result_is_dropped() -> None:
    """I-26: this is the row that was in flight when the stop token was read, and there is no other."""
    core = overlapped(reply=[7, 8])
    core.send("long", [3], max_tokens=20, ignore_eos=True)
    core.send("a", PROMPT, max_tokens=10)
    core.run()
    assert core.tokens("a") == [7, 8]
    end = core.finished("a")
    assert (end.reason, end.stop_token_id, end.usage.completion_tokens) == (FinishReason.STOP, EOS, 3)
    assert [row.kind for row in rows_of(core, "a")] == [RowKind.LAST, *[RowKind.DECODE] * 3]
    assert len(core.tokens("long")) == 20


def test_the_row_in_flight_of_an_ended_request_leaves_no_residue() -> None:
    core = overlapped(
        reply=[7, 8], recurrent_state=True, scheduler=SchedulerConfig(state_snapshot_tokens=4, state_snapshots=4)
    )
    core.send("a", PROMPT[:13], max_tokens=50)  # 13 + 2 + what is in flight: position 16, where a snapshot is due
    while not any(isinstance(event, Finished) for event in core.events["a"]):
        steps(core, 1)
    assert rows_of(core, "a")[-1].end == 16
    assert (core.load().num_running, core.load().num_held_blocks) == (0, 0), "freed with the event, not a step later"
    assert core.has_work
    assert steps(core, 1) == [[]]
    check_nothing_is_left(core)
    core.send("b", [*PROMPT[:13], 7, 8, EOS, 3, 3], max_tokens=1)
    core.run()
    assert core.finished("b").usage.cached_tokens == 12, "what was computed after the stop token was never offered"


def test_a_stop_token_in_flight_frees_the_seat_for_the_next_in_the_queue() -> None:
    core = overlapped(max_num_seqs=1, reply=[7])
    for name in "abc":
        core.send(name, PROMPT, max_tokens=9)
    core.run()
    assert [core.tokens(name) for name in "abc"] == [[7]] * 3
    check_nothing_is_left(core)


# --- abort and deadlines with a row in flight ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, 3, 6])
def test_an_abort_with_a_row_in_flight_ends_the_request_once_and_at_once(after: int) -> None:
    core = overlapped(max_num_batched_tokens=9, max_prefill_tokens=8)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True)
    core.send("b", PROMPT[:5], max_tokens=12, ignore_eos=True)
    steps(core, after)
    core.keep(core.abort("a"))
    assert core.finished("a").reason is FinishReason.ABORT
    events = list(core.events["a"])
    core.run()
    assert core.events["a"] == events, "nothing after the end"
    assert rows_of(core, "a")[-1] in [row for plan in core.plans[:after] for row in plan.rows], "nothing was launched"
    assert core.tokens("b") == answer_alone(PROMPT[:5], max_tokens=12, ignore_eos=True)
    check_nothing_is_left(core)


def test_an_id_that_is_used_again_does_not_get_the_late_row_of_the_request_before() -> None:
    core = overlapped()
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True)
    steps(core, 4)
    core.keep(core.abort("a"))
    core.events.clear()
    core.send("a", [9, 9], max_tokens=6, ignore_eos=True)
    assert steps(core, 1) == [[Scheduled("a", 0)]], "the late row of the first request is dropped"
    core.run()
    assert core.tokens("a") == answer_alone([9, 9], max_tokens=6, ignore_eos=True)
    check_nothing_is_left(core)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_id_that_is_used_again_does_not_inherit_the_deadline_of_the_request_before(overlap: bool) -> None:
    core = RecordingCore(overlap=overlap, tick_ms=100)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True, timeout_s=0.55, queue_timeout_s=0.45)
    steps(core, 2)
    core.keep(core.abort("a"))
    core.events.clear()
    core.send("a", [9, 9], max_tokens=12, ignore_eos=True)
    core.run()
    assert core.now > 1
    assert core.tokens("a") == answer_alone([9, 9], max_tokens=12, ignore_eos=True)


def test_a_deadline_with_a_row_in_flight_ends_the_request_once() -> None:
    core = overlapped(tick_ms=100)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True, timeout_s=0.55)
    core.send("b", PROMPT[:5], max_tokens=12, ignore_eos=True)
    core.run()
    end = core.events["a"][-1]
    assert isinstance(end, Failed)
    assert end.code is ErrorCode.DEADLINE_EXCEEDED
    assert sum(isinstance(event, Failed) for event in core.events["a"]) == 1
    assert len(rows_of(core, "a")) == 5, "launched at 0.1 s to 0.5 s"
    assert len(core.tokens("a")) == 4, "the fifth was in flight at the deadline"
    assert core.tokens("b") == answer_alone(PROMPT[:5], max_tokens=12, ignore_eos=True)
    check_nothing_is_left(core)


# --- preemption with a row in flight ---------------------------------------------------------------------------------


def test_preempting_a_request_with_a_row_in_flight_discards_its_token_and_samples_the_same_again() -> None:
    core = overlapped(num_kv_blocks=12, block_size=2, scheduler=TIGHT)
    outputs = watch_results(core)
    for i in range(3):
        core.send(f"r{i}", [1 + i] * 4, max_tokens=16, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    sampled: dict[tuple[str, int], list[int]] = {}
    for plan, output in zip(core.plans, outputs, strict=True):
        for row, tokens in zip(plan.rows, output.sampled, strict=True):
            for token in tokens:
                sampled.setdefault((row.request_id, row.end), []).append(token)
    again = [tokens for tokens in sampled.values() if len(tokens) > 1]
    assert again, "no row was in flight when its request was preempted"
    assert all(len(set(tokens)) == 1 for tokens in again)
    for i in range(3):
        assert core.tokens(f"r{i}") == answer_alone([1 + i] * 4, max_tokens=16, ignore_eos=True)
    check_nothing_is_left(core)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_step_lost_at_collect_fails_its_rows_and_the_step_in_flight_survives_for_others() -> None:
    core = overlapped()
    watch_results(core, fail=[0])
    core.send("bad", PROMPT, max_tokens=8, ignore_eos=True)
    steps(core, 1)
    core.send("good", PROMPT[:5], max_tokens=8, ignore_eos=True)
    (events,) = steps(core, 1)
    assert events == [Scheduled("good", 0), Failed("bad", ErrorCode.STEP_FAILED, "lost on the way")]
    assert {row.request_id for row in core.plans[1].rows} == {"bad", "good"}, "both were in flight"
    core.run()
    assert core.events["bad"] == [Scheduled("bad", 0), Failed("bad", ErrorCode.STEP_FAILED, "lost on the way")]
    assert core.tokens("good") == answer_alone(PROMPT[:5], max_tokens=8, ignore_eos=True)
    assert len(rows_of(core, "good")) == 8, "computed once: its row in flight counted"
    check_nothing_is_left(core)


def fail_once(step_id: int, error: Exception) -> Callable[[StepPlan], None]:
    def check(plan: StepPlan) -> None:
        if plan.step_id == step_id:
            raise error

    return check


def test_a_failed_launch_fails_its_own_rows_after_the_results_of_the_step_in_flight() -> None:
    core = overlapped(before_step=fail_once(1, RuntimeError("kernel fault")), reply=[7, 8, 9])
    core.send("done", PROMPT[:3], max_tokens=1)  # in step 0 only
    core.send("both", PROMPT[:5], max_tokens=5)  # in both steps
    steps(core, 1)
    core.send("late", PROMPT[:7], max_tokens=5)  # in step 1 only
    steps(core, 1)
    failed = {name: Failed(name, ErrorCode.STEP_FAILED, "kernel fault") for name in ("both", "late")}
    assert core.tokens("done") == [7]
    assert core.finished("done").reason is FinishReason.LENGTH
    assert core.events["both"] == [Scheduled("both", 0), Token("both", 7), failed["both"]]
    assert core.events["late"] == [Scheduled("late", 0), failed["late"]]
    check_nothing_is_left(core)
    core.send("after", PROMPT, max_tokens=2)
    core.run()
    assert core.tokens("after") == [7, 8]


def test_a_request_that_ended_in_the_step_before_a_failed_launch_has_not_failed() -> None:
    """Nobody needed the row it had in the failed step: the stop token had been sampled before."""
    core = overlapped(before_step=fail_once(1, RuntimeError("kernel fault")), reply=[])
    core.send("a", PROMPT, max_tokens=5)
    core.run()
    assert core.finished("a").stop_token_id == EOS
    check_nothing_is_left(core)


def test_a_row_that_fails_alone_takes_its_row_in_flight_with_it_and_no_neighbour() -> None:
    core = overlapped(failing=lambda row: "no finite logit" if row.request_id == "bad" and row.start == 20 else None)
    for name in ("good", "bad", "other"):
        core.send(name, PROMPT, max_tokens=8, ignore_eos=True)
    core.run()
    failures = [event for event in core.events["bad"] if isinstance(event, Failed)]
    assert failures == [core.events["bad"][-1]] == [Failed("bad", ErrorCode.STEP_FAILED, "no finite logit")]
    assert len(core.tokens("bad")) == 2
    assert rows_of(core, "bad")[-1].start == 21, "one row was launched on top of the failed one"
    assert core.tokens("good") == core.tokens("other") == answer_alone(PROMPT, max_tokens=8, ignore_eos=True)
    check_nothing_is_left(core)


def test_a_fatal_error_at_collect_leaves_the_core() -> None:
    core = overlapped()
    core.send("a", PROMPT, max_tokens=3)

    def die() -> StepOutput:
        raise ExecutorFatalError("device lost")

    core._executor.collect = die  # type: ignore[method-assign]
    steps(core, 1)
    with pytest.raises(ExecutorFatalError, match="device lost"):
        core.step()


def test_a_step_that_runs_out_of_memory_while_another_is_in_flight_is_tried_again_with_half() -> None:
    def check(plan: StepPlan) -> None:
        if plan.num_tokens > 20:
            raise ExecutorOutOfMemoryError("no room for activations")

    core = overlapped(before_step=check, max_num_batched_tokens=32, max_prefill_tokens=32)
    core.send("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    steps(core, 2)
    core.send("b", [5] * 40, max_tokens=2, ignore_eos=True)
    (events,) = steps(core, 1)
    first = answer_alone([1, 2, 3], max_tokens=12, ignore_eos=True)
    assert events == [Scheduled("b", 0), Token("a", first[1])], "the step in flight is read back, and nobody failed"
    assert not core._in_flight
    core.run()
    assert core.tokens("a") == first
    assert core.tokens("b") == answer_alone([5] * 40, max_tokens=2, ignore_eos=True)
    assert [plan.num_tokens for plan in core.plans][2:4] == [29, 13], "1 + 28, then 1 + half of it, to a block's end"
    retried = next(row for row in core.plans[3].rows if row.request_id == "a")
    assert retried.token_ids == (first[1],), "by now it is read back"
    assert sum(isinstance(event, Scheduled) for event in core.events["b"]) == 1
    check_nothing_is_left(core)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("idle_steps", [0, 1])
def test_a_request_gets_its_retry_although_the_one_before_it_was_aborted_during_its_own(
    overlap: bool, idle_steps: int
) -> None:
    """Regression: one request was aborted during its retry, and then the engine took the first failure of the next
    request for the second of the aborted one."""

    def check(plan: StepPlan) -> None:
        if plan.num_tokens > 12:
            raise ExecutorOutOfMemoryError("no room for activations")

    core = RecordingCore(overlap=overlap, before_step=check)
    core.send("a", PROMPT, max_tokens=1)
    steps(core, 1)
    core.keep(core.abort("a"))
    steps(core, idle_steps)
    core.send("b", PROMPT, max_tokens=2)
    core.run()
    assert core.tokens("b") == answer_alone(PROMPT, max_tokens=2)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("old", "young"), [(PROMPT, PROMPT[:3]), (PROMPT[:3], PROMPT)])
def test_a_retry_keeps_the_order_of_prompts(old: list[int], young: list[int], overlap: bool) -> None:
    """Regression: a young prompt that the failed step would have completed came back before an older, longer one."""
    fail = True

    def check(plan: StepPlan) -> None:
        nonlocal fail
        if fail and len(plan.rows) == 2:
            fail = False
            raise ExecutorOutOfMemoryError("injected")

    scheduler = SchedulerConfig(long_prefill_token_threshold=4)
    core = RecordingCore(overlap=overlap, before_step=check, scheduler=scheduler)
    core.send("old", old, max_tokens=1)
    core.send("young", young, max_tokens=1)
    steps(core, 2)
    assert [[row.request_id for row in plan.rows] for plan in core.plans] == [["old", "young"], ["old"]]
    core.run()
    assert core.tokens("old") == answer_alone(old, max_tokens=1)


# --- steps that sample nothing ---------------------------------------------------------------------------------------


def test_a_step_of_prefill_alone_still_delivers_the_results_of_the_step_before() -> None:
    """S4-R8: such a step returned early, and the tokens of the step before it were never sent."""
    core = overlapped(
        max_num_batched_tokens=9,
        max_prefill_tokens=4,
        max_num_seqs=2,
        scheduler=SchedulerConfig(batch_mode="prefill_first"),
    )
    core.send("a", PROMPT[:3], max_tokens=8, ignore_eos=True)
    steps(core, 2)
    core.send("b", PROMPT, max_tokens=2, ignore_eos=True)
    (events,) = steps(core, 1)
    assert [row.kind for row in core.plans[-1].rows] == [RowKind.MIDDLE], "prefill alone"
    answer = answer_alone(PROMPT[:3], max_tokens=8, ignore_eos=True)
    assert events == [Scheduled("b", 0), Token("a", answer[1])]
    core.run()
    assert core.tokens("a") == answer
    assert core.tokens("b") == answer_alone(PROMPT, max_tokens=2, ignore_eos=True)


def test_a_chunk_is_lent_to_others_only_once_it_is_read_back() -> None:
    """S4-R11 under overlap: a chunk that is launched is not yet computed."""
    core = overlapped(max_num_batched_tokens=9, max_prefill_tokens=8, max_num_seqs=2)
    core.send("a", PROMPT, max_tokens=1)
    steps(core, 1)
    assert core._blocks.match(core._scheduler.find("a").block_hashes) == ()  # type: ignore[union-attr]
    steps(core, 1)
    assert len(core._blocks.match(core._scheduler.find("a").block_hashes)) == 2  # type: ignore[union-attr]
    core.run()
