"""Contracts of recurrent state: dense slots, snapshots for prefix hits, and what is left after faults. Long: a fault of
each kind.
The specification's I-9, and the hand-over of S1-B3.
The fake executor fails a row whose state is not that of its prefix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ConfigError, EngineConfig, SchedulerConfig
from engine.core.capabilities import check_capabilities
from engine.protocol import ErrorCode, Failed, Finished
from engine.scheduling.state_slots import RecurrentStates, Snapshots, StateSlots
from engine.step import Capabilities, ExecutorOutOfMemoryError, RowKind, ScheduledRequest, StepPlan
from tests.support.engines import RecordingCore, answer_alone, resolved_config, resource_of
from tests.support.plan_rows import rows_of

PROMPT = list(range(1, 20))


def hybrid(
    stride: int = 8, snapshots: int = 64, policy: dict[str, Any] | None = None, **overrides: Any
) -> RecordingCore:
    scheduler = SchedulerConfig(state_snapshot_tokens=stride, state_snapshots=snapshots, **(policy or {}))
    return RecordingCore(recurrent_state=True, scheduler=scheduler, **overrides)


def check_nothing_is_left(core: RecordingCore) -> None:
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_held_blocks) == (0, 0, 0)
    states = resource_of(core, RecurrentStates)
    assert len(states.slots) == 0
    assert not states._restores
    slots = sorted([*states.snapshots._free, *states.snapshots._slots.values()])
    assert slots == list(range(core.config.scheduler.state_snapshots)), "every snapshot is free or kept, once"


# --- slots -----------------------------------------------------------------------------------------------------------


def test_the_last_slot_moves_into_the_hole_that_a_request_leaves() -> None:
    slots = StateSlots()
    for name in "abc":
        slots.take(name)
    slots.give_back("a")
    assert (slots.slot_of("b"), slots.slot_of("c"), len(slots)) == (1, 0, 2)
    assert slots.take_moves() == ((2, 0),)
    assert slots.take_moves() == (), "each move is made once"


def test_the_last_slot_leaves_without_a_move() -> None:
    slots = StateSlots()
    for name in "ab":
        slots.take(name)
    slots.give_back("b")
    assert slots.take_moves() == ()
    slots.take("c")
    assert slots.slot_of("c") == 1


def test_a_request_has_one_slot() -> None:
    slots = StateSlots()
    slots.take("a")
    with pytest.raises(AssertionError, match="a has a state slot"):
        slots.take("a")
    slots.give_back("a")
    with pytest.raises(KeyError):
        slots.give_back("a")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.just("take"), st.just("step"), st.integers(0, 6)), max_size=60))
def test_slots_stay_dense_and_moves_keep_the_state_of_every_owner(ops: list[str | int]) -> None:
    """An array stands for the device: a step makes its moves, then every running request rewrites its own slot."""
    slots = StateSlots()
    device: dict[int, str] = {}
    running: dict[str, str | None] = {}  # owner -> the state it had after its last step; None if it has not run
    for number, op in enumerate([*ops, "step"]):
        if op == "take":
            slots.take(f"r{number}")
            running[f"r{number}"] = None
        elif isinstance(op, int) and running:
            name = list(running)[op % len(running)]
            slots.give_back(name)
            del running[name]
        elif op == "step":
            for source, target in slots.take_moves():
                device[target] = device.get(source, "nothing")
            for name, state in running.items():
                assert state is None or device[slots.slot_of(name)] == state
            for name in running:
                running[name] = device[slots.slot_of(name)] = f"{name} after {number}"
        assert sorted(map(slots.slot_of, running)) == list(range(len(running))) == list(range(len(slots)))


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_found_once_it_is_published_and_not_while_it_is_saved() -> None:
    snapshots = Snapshots(2)
    slot = snapshots.reserve()
    assert slot is not None
    assert snapshots.find(b"x") is None
    snapshots.publish(slot, b"x")
    assert snapshots.find(b"x") == snapshots.use(b"x") == slot


def test_the_snapshot_that_was_unused_for_longest_is_overwritten() -> None:
    snapshots = Snapshots(2)
    for digest in (b"x", b"y"):
        snapshots.publish(snapshots.reserve() or 0, digest)
    snapshots.use(b"x")
    slot = snapshots.find(b"y")
    assert snapshots.reserve() == slot
    assert (snapshots.find(b"x") is not None, snapshots.find(b"y")) == (True, None)


def test_a_cancelled_save_gives_its_slot_back() -> None:
    snapshots = Snapshots(1)
    slot = snapshots.reserve()
    assert slot is not None
    assert snapshots.reserve() is None, "all are being saved to"
    snapshots.cancel(slot)
    assert snapshots.reserve() == slot


def test_the_first_snapshot_of_a_prefix_stays() -> None:
    snapshots = Snapshots(2)
    first, second = snapshots.reserve(), snapshots.reserve()
    assert first is not None
    assert second is not None
    snapshots.publish(first, b"x")
    snapshots.publish(second, b"x")
    assert snapshots.find(b"x") == first
    assert snapshots.reserve() == second, "the other one is free again"


def test_the_epoch_changes_with_every_answer() -> None:
    snapshots = Snapshots(1)
    snapshots.publish(snapshots.reserve() or 0, b"x")
    published = snapshots.epoch
    assert published > 0
    assert snapshots.reserve() == 0
    assert snapshots.epoch > published


# --- through the core: the same tokens, and hits at snapshots only ---------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stride", [0, 4, 12])
@pytest.mark.parametrize("budget", [9, 64])
def test_tokens_are_those_of_a_model_without_state(stride: int, budget: int, overlap: bool) -> None:
    core = hybrid(stride, overlap=overlap, max_num_batched_tokens=budget, max_prefill_tokens=budget, num_kv_blocks=200)
    for again in ("", " again"):
        for i in range(8):
            core.send(f"r{i}{again}", PROMPT[: 3 + 2 * i], max_tokens=3 + 2 * i, temperature=1.0, seed=i)
        core.run()
    for i in range(8):
        expected = answer_alone(PROMPT[: 3 + 2 * i], max_tokens=3 + 2 * i, temperature=1.0, seed=i)
        assert core.tokens(f"r{i}") == core.tokens(f"r{i} again") == expected
    assert any(plan.state_moves for plan in core.plans), "nobody left a hole"
    check_nothing_is_left(core)


def test_every_step_finds_its_rows_in_the_first_slots() -> None:
    """S1-B3: a captured graph uses one range of slots, whichever requests have left."""
    core = hybrid(max_num_seqs=5)
    for i in range(9):
        core.send(f"r{i}", [1 + i] * 3, max_tokens=3 + 5 * i % 11, ignore_eos=True)
    while core.has_work:
        core.keep(core.step())
        slots = [row.state.slot for row in core.plans[-1].rows if row.state]
        assert sorted(slots) == list(range(len(core.plans[-1].rows))), "all running requests have a row here"
    check_nothing_is_left(core)


@pytest.mark.parametrize(("stride", "cached"), [(4, 16), (8, 16), (12, 12), (16, 16), (20, 0), (0, 0)])
def test_a_prefix_hit_starts_at_a_snapshot_and_nowhere_else(stride: int, cached: int) -> None:
    core = hybrid(stride)
    core.send("first", PROMPT, max_tokens=1)
    core.run()
    core.send("second", PROMPT, max_tokens=5)
    core.run()
    assert core.finished("second").usage.cached_tokens == cached
    assert rows_of(core, "second")[0].start == cached
    assert core.tokens("second") == answer_alone(PROMPT, max_tokens=5)


def test_decoding_keeps_snapshots_too_so_that_the_next_turn_of_a_chat_starts_there() -> None:
    core = hybrid(8)
    core.send("turn 1", PROMPT, max_tokens=16, ignore_eos=True)
    core.run()
    prompt = [*PROMPT, *core.tokens("turn 1"), 3, 3]
    core.send("turn 2", prompt, max_tokens=4)
    core.run()
    assert core.finished("turn 2").usage.cached_tokens == 32, "34 positions are written; the last multiple of 8"
    assert core.tokens("turn 2") == answer_alone(prompt, max_tokens=4)


def test_chunks_end_at_every_multiple_of_the_stride() -> None:
    core = hybrid(8, max_num_batched_tokens=64, max_prefill_tokens=64)
    core.send("a", PROMPT, max_tokens=1)
    core.run()
    rows = rows_of(core, "a")
    assert [(row.start, row.end, row.kind) for row in rows] == [
        (0, 8, RowKind.MIDDLE),
        (8, 16, RowKind.MIDDLE),
        (16, 19, RowKind.LAST),
    ]
    assert [row.state is not None and row.state.save is not None for row in rows] == [True, True, False]


def test_a_hit_that_starts_between_two_strides_still_ends_its_chunk_at_the_next() -> None:
    core = hybrid(8, policy=dict(long_prefill_token_threshold=4), max_num_batched_tokens=64)
    core.send("a", PROMPT, max_tokens=1)
    core.run()
    assert [row.end for row in rows_of(core, "a")] == [4, 8, 12, 16, 19]
    saves = [row.end for row in rows_of(core, "a") if row.state and row.state.save is not None]
    assert saves == [8, 16]


def test_a_block_without_its_snapshot_is_no_hit_and_a_snapshot_without_its_block_neither() -> None:
    core = hybrid(4, snapshots=2)
    core.send("first", PROMPT, max_tokens=1)  # snapshots at 4, 8, 12 and 16: the last two are left
    core.run()
    core.send("short", PROMPT[:10], max_tokens=1)
    core.run()
    assert core.finished("short").usage.cached_tokens == 0, "blocks up to 8, but no state there"
    cacheless = hybrid(4, enable_prefix_caching=False)
    for name in ("first", "second"):
        cacheless.send(name, PROMPT, max_tokens=1)
        cacheless.run()
    assert cacheless.finished("second").usage.cached_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("others_first", [False, True])
def test_a_snapshot_that_a_plan_starts_from_is_not_overwritten_by_a_save_of_the_same_step(
    others_first: bool, overlap: bool
) -> None:
    """Regression: the save of a row before it took the only snapshot, and the engine died of a KeyError."""
    core = hybrid(4, snapshots=1, policy=dict(max_partial_prefills=0), overlap=overlap)
    core.send("first", PROMPT[:6], max_tokens=1)
    core.run()
    names = ["other", "again"] if others_first else ["again", "other"]
    for name in names:
        core.send(name, PROMPT[:6] if name == "again" else [7] * 12, max_tokens=3, ignore_eos=True)
    core.keep(core.step())
    states = {row.request_id: row.state for row in core.plans[-1].rows}
    assert states["again"] is not None
    assert states["other"] is not None
    assert states["again"].restore == states["other"].save == 0
    core.run()
    assert core.tokens("again") == answer_alone(PROMPT[:6], max_tokens=3, ignore_eos=True)
    assert core.tokens("other") == answer_alone([7] * 12, max_tokens=3, ignore_eos=True)
    check_nothing_is_left(core)


def test_without_a_free_snapshot_a_row_runs_and_saves_nothing() -> None:
    core = hybrid(4, snapshots=1, policy=dict(max_partial_prefills=0))
    for i in range(3):
        core.send(f"r{i}", [1 + i] * 7, max_tokens=2, ignore_eos=True)
    core.keep(core.step())
    assert [row.state.save for row in core.plans[0].rows if row.state] == [0, None, None]
    core.run()
    for i in range(3):
        assert core.tokens(f"r{i}") == answer_alone([1 + i] * 7, max_tokens=2, ignore_eos=True)
    check_nothing_is_left(core)


# --- preemption, failures, and steps that are tried again ------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_is_computed_again_from_a_snapshot(overlap: bool) -> None:
    policy = dict(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo")
    core = hybrid(4, policy=policy, num_kv_blocks=24, block_size=2, overlap=overlap)
    for i in range(4):
        core.send(f"r{i}", [1 + i] * 9, max_tokens=28, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    for i in range(4):
        assert core.tokens(f"r{i}") == answer_alone([1 + i] * 9, max_tokens=28, ignore_eos=True)
    restored = [row for plan in core.plans for row in plan.rows if row.state and row.state.restore is not None]
    assert restored, "every preempted request began anew"
    assert all(row.start and row.start % 4 == 0 for row in restored)
    check_nothing_is_left(core)


def failing_steps(step_ids: set[int], error: type[Exception]) -> Callable[[StepPlan], None]:
    def check(plan: StepPlan) -> None:
        if plan.step_id in step_ids:
            raise error("injected")

    return check


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step_id", range(9))
def test_a_failed_step_leaves_the_states_of_others_right_and_gives_its_snapshots_back(
    step_id: int, overlap: bool
) -> None:
    policy = dict(batch_mode="prefill_first", max_partial_prefills=0)
    core = hybrid(
        4,
        snapshots=3,
        policy=policy,
        before_step=failing_steps({step_id}, RuntimeError),
        max_num_batched_tokens=12,
        max_prefill_tokens=6,
        overlap=overlap,
    )
    for i in range(6):
        core.send(f"r{i}", [1 + i] * (3 + 2 * i), max_tokens=4 + i % 3, ignore_eos=True)
    core.run()
    failed = {row.request_id for plan in core.plans if plan.step_id == step_id for row in plan.rows}
    for i in range(6):
        end, expected = (
            core.events[f"r{i}"][-1],
            answer_alone([1 + i] * (3 + 2 * i), max_tokens=4 + i % 3, ignore_eos=True),
        )
        assert isinstance(end, Finished) or f"r{i}" in failed
        assert core.tokens(f"r{i}") == expected[: len(core.tokens(f"r{i}"))]
        if isinstance(end, Finished):
            assert core.tokens(f"r{i}") == expected
    assert any(isinstance(core.events[name][-1], Failed) for name in failed)
    check_nothing_is_left(core)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_fails_alone_before_its_slot_was_ever_written_harms_nobody(overlap: bool) -> None:
    """Regression: the save of a state that did not exist failed the whole step."""
    core = hybrid(4, failing=lambda row: "broken" if row.request_id == "bad" else None, overlap=overlap)
    core.send("good", [2] * 3, max_tokens=9, ignore_eos=True)
    core.send("bad", PROMPT, max_tokens=1)
    core.run()
    assert core.events["bad"][-1] == Failed("bad", ErrorCode.STEP_FAILED, "broken")
    assert core.tokens("good") == answer_alone([2] * 3, max_tokens=9, ignore_eos=True)
    core.send("same prompt", PROMPT[:5], max_tokens=1)
    core.run()
    assert core.finished("same prompt").usage.cached_tokens == 0
    check_nothing_is_left(core)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_started_from_a_snapshot_keeps_its_state_through_a_retry(overlap: bool) -> None:
    """A plan that ran out of memory has already copied the snapshot; the copy stays, and is not made again."""
    fail = False

    def check(plan: StepPlan) -> None:
        nonlocal fail
        if fail:
            fail = False
            raise ExecutorOutOfMemoryError("injected")

    core = hybrid(8, before_step=check, overlap=overlap)
    core.send("first", PROMPT, max_tokens=1)
    core.send("neighbour", [3] * 5, max_tokens=24, ignore_eos=True)
    while not isinstance((core.events["first"] or [None])[-1], Finished):
        core.keep(core.step())
    fail = True
    core.send("second", PROMPT, max_tokens=6, ignore_eos=True)
    core.keep(core.step())
    failed = core.plans[-1]
    assert failed.state_moves == ((1, 0),), "the hole that the first request left was filled in the step that failed"
    assert [row.state.restore is not None for row in failed.rows if row.state] == [False, True]
    assert failed.rows[-1].start == 16
    core.run()
    again = rows_of(core, "second")[1]
    assert (again.start, again.state.restore if again.state else 0) == (16, None)
    assert core.tokens("second") == answer_alone(PROMPT, max_tokens=6, ignore_eos=True)
    assert core.tokens("neighbour") == answer_alone([3] * 5, max_tokens=24, ignore_eos=True)
    assert core.finished("second").usage.cached_tokens == 16
    check_nothing_is_left(core)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_an_abort_gives_the_slot_and_the_snapshots_in_the_making_back(steps: int, overlap: bool) -> None:
    core = hybrid(4, snapshots=2, max_num_batched_tokens=9, max_prefill_tokens=4, overlap=overlap)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True)
    core.send("b", [3] * 5, max_tokens=9, ignore_eos=True)
    for _ in range(steps):
        core.keep(core.step())
    core.keep(core.abort("a"))
    core.run()
    assert core.tokens("b") == answer_alone([3] * 5, max_tokens=9, ignore_eos=True)
    check_nothing_is_left(core)


# --- drafts: a state is never that of a token which was rejected ------------------------------------------------------


def drafting(stride: int, num_drafts: int, **overrides: Any) -> RecordingCore:
    """Make a core with drafts; whether the fake executor's are right depends on the text."""
    return hybrid(stride, num_speculative_tokens=num_drafts, **overrides)


def drafted_rows(core: RecordingCore) -> list[ScheduledRequest]:
    rows = (row for plan in core.plans for row in plan.rows)
    return [row for row in rows if row.kind is RowKind.DECODE and len(row.token_ids) > 1]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_answers_with_drafts_are_those_without(num_drafts: int) -> None:
    core = drafting(8, num_drafts, max_num_batched_tokens=64)
    prompts = [PROMPT, PROMPT[:9], [7] * 12, [3, 4] * 4]
    for number, prompt in enumerate(prompts):
        core.send(f"r{number}", prompt, max_tokens=30 - number, ignore_eos=True)
    core.run()
    for number, prompt in enumerate(prompts):
        assert core.tokens(f"r{number}") == answer_alone(prompt, max_tokens=30 - number, ignore_eos=True)
    counts = {name: [row.start for row in rows_of(core, name)] for name in ("r0", "r1")}
    assert drafted_rows(core)
    steps = [after - before for starts in counts.values() for before, after in pairwise(starts)]
    assert 1 in steps, "a draft was rejected"
    assert max(steps[3:]) > 1, "a draft was accepted"
    check_nothing_is_left(core)


def test_a_row_ends_where_its_state_is_to_be_kept_and_keeps_it_if_its_drafts_were_right() -> None:
    """The next turn of a chat starts from the last answer,
    and a row that ran past the place would have no state to keep there."""
    core = drafting(8, 5)
    core.send("first", PROMPT[:6], max_tokens=40, ignore_eos=True)
    core.run()
    rows = drafted_rows(core)
    assert all(row.start // 8 == (row.end - 1) // 8 for row in rows)
    saves = [row for row in rows if row.state is not None and row.state.save is not None]
    assert saves
    assert all(row.end % 8 == 0 for row in saves)
    text = [*PROMPT[:6], *core.tokens("first")]
    core.send("second", text, max_tokens=4, ignore_eos=True)
    core.run()
    assert core.finished("second").usage.cached_tokens == 40, "of 46 tokens, up to the last multiple of 8"
    assert core.tokens("second") == answer_alone(text, max_tokens=4, ignore_eos=True)
    check_nothing_is_left(core)


def test_the_snapshot_of_a_row_whose_drafts_were_wrong_is_given_back_and_nobody_starts_from_it() -> None:
    core = drafting(8, 5)
    cancelled = []
    snapshots = resource_of(core, RecurrentStates).snapshots
    cancel = snapshots.cancel
    snapshots.cancel = lambda slot: (cancelled.append(slot), cancel(slot))[1]  # type: ignore[method-assign]
    core.send("a", PROMPT[:6], max_tokens=60, ignore_eos=True)
    core.run()
    saves = [row for row in drafted_rows(core) if row.state is not None and row.state.save is not None]
    assert cancelled, "no draft of a row that ends at a snapshot was wrong"
    assert len(cancelled) < len(saves)
    text = [*PROMPT[:6], *core.tokens("a")]
    assert text[6:] == answer_alone(PROMPT[:6], max_tokens=60, ignore_eos=True)
    for end in range(8, len(text), 4):
        prompt = [*text[:end], 31, 30]
        core.send(f"to {end}", prompt, max_tokens=3, ignore_eos=True)
        core.run()
        assert core.finished(f"to {end}").usage.cached_tokens == end // 8 * 8
        assert core.tokens(f"to {end}") == answer_alone(prompt, max_tokens=3, ignore_eos=True)
    check_nothing_is_left(core)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_go_with_recurrent_state_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 1, but .* no drafts"):
        check_capabilities(resolved_config(num_speculative_tokens=1), Capabilities(recurrent_state=True))
    can = Capabilities(recurrent_state=True, drafts=True)
    check_capabilities(resolved_config(num_speculative_tokens=1), can)
    with pytest.raises(ConfigError, match="chunk_owner is engine, but this model has a recurrent state"):
        check_capabilities(resolved_config(scheduler=SchedulerConfig(chunk_owner="engine")), can)
    with pytest.raises(ConfigError, match="state_snapshot_tokens is 4, but this model has no recurrent state"):
        check_capabilities(resolved_config(scheduler=SchedulerConfig(state_snapshot_tokens=4)), Capabilities())
    with pytest.raises(ConfigError, match="multiple of block_size"):
        EngineConfig(block_size=16, scheduler=SchedulerConfig(state_snapshot_tokens=24))
