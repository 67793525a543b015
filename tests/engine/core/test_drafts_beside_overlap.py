"""Contracts of drafts beside overlapped steps: answers show neither, and rows without drafts overlap. Long: every end
and fault, with drafts in flight. Texts that repeat themselves are scripted; forced drafts are the fake executor's, of
which a quarter is wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.config import EngineConfig, ResolvedConfig, SchedulerConfig, SpeculativeConfig, Targets
from engine.core.wall_times import Chunk, Costs, Shares, WallTimes
from engine.protocol import Failed, Finished, FinishReason, TimeCause
from engine.scheduling.planner import Plan
from engine.scheduling.step_time import StepCosts, chunk_work, decode_work
from engine.step import PENDING_TOKEN, RowKind, ScheduledRequest, StepOutput, StepPlan
from tests.support.drafting import (
    FEW,
    SCHEDULES,
    check_another_engine_goes_on,
    check_bad_fails_alone,
    check_nobody_can_tell,
    decode_rows,
    no_logit_for_bad,
)
from tests.support.engines import RecordingCore, TimedCore, answer_alone
from tests.support.plan_rows import rows_of

PROMPT = list(range(1, 20))
EAGER = SpeculativeConfig(method="suffix", min_match=1, num_tokens=6, adaptive=False, free_tokens=8)
NGRAM = replace(EAGER, method="ngram", max_match=3)
ADAPTIVE = replace(EAGER, adaptive=True, min_match=2, num_tokens=8)
FORCED: dict[str, Any] = {"num_speculative_tokens": 4}
"""The fake executor's own drafts, which the engine takes for those of a grammar."""
SOURCES: dict[str, dict[str, Any]] = {
    "suffix": {"speculative": EAGER},
    "ngram": {"speculative": NGRAM},
    "adaptive": {"speculative": ADAPTIVE},
    "forced": FORCED,
}
REPEATED = [3, 1, 4, 1, 5, 9, 2, 6] * 12


def both(**overrides: Any) -> RecordingCore:
    """Make a core with overlap and drafts."""
    return RecordingCore(**{"overlap": True, "num_speculative_tokens": 4, "max_num_batched_tokens": 64, **overrides})


def is_pending(row: ScheduledRequest) -> bool:
    return row.token_ids == (PENDING_TOKEN,)


def in_two_steps_in_turn(core: RecordingCore) -> Iterator[tuple[StepPlan, StepPlan]]:
    """Yield pairs of steps of which the second was launched before the first was read back."""
    return ((one, two) for one, two in pairwise(core.plans) if any(map(is_pending, two.rows)))


def check_nothing_is_left(core: RecordingCore) -> None:
    load = core.load()
    assert (load.num_running, load.num_waiting, load.num_held_blocks, load.num_queued_tokens) == (0, 0, 0, 0)
    assert not core.has_work
    executor: Any = core._executor
    assert (list(executor._outputs), list(executor._unread), executor._newest) == ([], [], {})


# --- the same answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_event_but_its_step_is_that_of_the_plain_loop(source: str, schedule: str, temperature: float) -> None:
    settings = {"num_speculative_tokens": 3, **SOURCES[source], **SCHEDULES[schedule]}
    if schedule == "small steps":
        settings["max_num_batched_tokens"] = 2 * (1 + settings["num_speculative_tokens"]) + 1
    core = both(alphabet=FEW, **settings)
    check_nobody_can_tell(core, schedule, temperature, num_texts=9)
    assert any(is_pending(row) for row in decode_rows(core)), "steps overlap"
    if source != "adaptive":
        assert any(len(row.token_ids) > 1 for row in decode_rows(core)), "and rows have drafts"
    check_nothing_is_left(core)


@pytest.mark.parametrize("settings", [{"speculative": EAGER}, FORCED], ids=["suffix", "forced"])
def test_another_engine_goes_on_from_any_token_of_an_accepted_draft(settings: dict[str, Any]) -> None:
    check_another_engine_goes_on(lambda: both(**settings))


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_stop_token_among_accepted_drafts_ends_the_answer(stop: int) -> None:
    reply = list(range(1, 21))
    core = both(reply=reply, **FORCED)
    core.send("a", PROMPT, max_tokens=30, stop_token_ids=(stop,))
    core.run()
    end = core.finished("a")
    assert (core.tokens("a"), end.reason, end.stop_token_id) == (reply[: stop - 1], FinishReason.STOP, stop)
    check_nothing_is_left(core)


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_no_row_reaches_past_the_last_token_that_may_be_sampled(max_tokens: int) -> None:
    core = both(**FORCED)
    core.send("a", PROMPT, max_tokens=max_tokens, ignore_eos=True)
    core.run()
    assert core.tokens("a") == answer_alone(PROMPT, max_tokens=max_tokens, ignore_eos=True)
    assert max(row.end for row in rows_of(core, "a")) == len(PROMPT) + max_tokens - 1
    check_nothing_is_left(core)


def test_a_hybrid_models_state_never_consumes_a_rejected_draft() -> None:
    scheduler = SchedulerConfig(state_snapshot_tokens=8)
    core = both(recurrent_state=True, scheduler=scheduler, speculative=EAGER, alphabet=FEW)
    plain = RecordingCore(alphabet=FEW)
    for engine in (core, plain):
        for i in range(5):
            engine.send(f"r{i}", [1 + i, *PROMPT], max_tokens=20 + i, ignore_eos=True)
        engine.run()
    assert [core.tokens(f"r{i}") for i in range(5)] == [plain.tokens(f"r{i}") for i in range(5)]
    rows = decode_rows(core, "r0")
    assert any(after.start < before.end for before, after in pairwise(rows)), "a draft was rejected"


def test_published_blocks_hold_accepted_tokens_only() -> None:
    core = both(speculative=EAGER, alphabet=FEW)
    core.send("first", PROMPT, max_tokens=40, ignore_eos=True)
    core.send("beside", PROMPT[:7], max_tokens=80, ignore_eos=True)
    while len(core.tokens("first")) < 30:
        core.keep(core.step())
        if request := core._scheduler.find("first"):
            assert request.num_published == request.computed // 4
            assert request.computed <= len(request.token_ids) - 1 or request.num_pending
    second = [*PROMPT, *core.tokens("first")[:30], 5, 5]
    core.send("second", second, max_tokens=10, ignore_eos=True)
    core.run()
    alone = RecordingCore(alphabet=FEW)
    alone.send("second", second, max_tokens=10, ignore_eos=True)
    alone.run()
    assert core.tokens("second") == alone.tokens("second")
    assert core.finished("second").usage.cached_tokens == (len(PROMPT) + 29) // 4 * 4


# --- who stands aside ------------------------------------------------------------------------------------------------


def test_a_row_whose_drafts_are_in_flight_is_left_out_and_all_others_overlap() -> None:
    core = both(speculative=replace(EAGER, min_match=4), alphabet=tuple(range(32)))
    core.send("copies", [7] * 8, max_tokens=24, ignore_eos=True, allowed_token_ids=(7,))
    for i in range(3):
        core.send(f"r{i}", [1 + i, 30 - i], max_tokens=30, ignore_eos=True)
    core.run()
    drafted = [(one, two) for one, two in in_two_steps_in_turn(core) if any(len(r.token_ids) > 1 for r in decodes(one))]
    assert drafted
    for one, two in drafted:
        waiting = {row.request_id for row in decodes(one) if len(row.token_ids) > 1}
        assert not waiting & {row.request_id for row in two.rows}, "where it starts is not known yet"
        left = {row.request_id for row in decodes(one)} - waiting
        assert {row.request_id for row in two.rows if is_pending(row)} == left, "the others do not notice"
    for i in range(3):
        assert core.tokens(f"r{i}") == answer_alone([1 + i, 30 - i], max_tokens=30, ignore_eos=True)


def decodes(plan: StepPlan) -> list[ScheduledRequest]:
    return [row for row in plan.rows if row.kind is RowKind.DECODE]


def test_rows_that_all_have_drafts_run_together_as_without_overlap() -> None:
    """Regression: two rows that began a step apart would stand aside in turn for ever, each in a step of its own."""
    core = both(speculative=EAGER, reply=REPEATED)
    plain = both(overlap=False, speculative=EAGER, reply=REPEATED)
    for engine in (core, plain):
        engine.send("a", [2, 7], max_tokens=96, ignore_eos=True)
        engine.keep(engine.step())
        engine.send("b", [2, 7], max_tokens=96, ignore_eos=True)
        engine.run()
    assert core.tokens("a") == core.tokens("b") == REPEATED
    assert core.load().num_steps <= plain.load().num_steps + 4
    together = [plan for plan in core.plans if len(decodes(plan)) == 2]
    assert sum(all(len(row.token_ids) > 1 for row in decodes(plan)) for plan in together) > 10


def test_a_row_that_a_plan_gave_no_room_for_its_drafts_does_not_stand_aside() -> None:
    core = both(drafting_limit=6, alphabet=(7,), **FORCED)
    for i in range(3):
        core.send(f"r{i}", [7] * (4 + i), max_tokens=30, ignore_eos=True)
    plans: list[tuple[set[str], set[str]]] = []
    plan_of = core._scheduler.plan

    def watched(now: float) -> Plan:
        drafted = {name for name, request in core._scheduler.decoding.items() if request.drafts}
        plan = plan_of(now)
        plans.append((drafted, {row.request.request_id for row in plan.rows if row.num_tokens == 1}))
        return plan

    core._scheduler.plan = watched  # type: ignore[method-assign]
    core.run()
    gave_up = [(drafted & single, after[1]) for (drafted, single), after in pairwise(plans) if drafted & single]
    assert gave_up
    assert any(names <= after for names, after in gave_up), "they go on from the token in flight"
    for i in range(3):
        assert core.tokens(f"r{i}") == [7] * 30


def test_beside_others_a_few_forced_tokens_are_not_worth_standing_aside() -> None:
    few, many = both(num_speculative_tokens=3), both(num_speculative_tokens=4)
    for core in (few, many):
        for name in "ab":
            core.send(name, PROMPT, max_tokens=30, ignore_eos=True)
        core.run()
        assert core.tokens("a") == core.tokens("b") == answer_alone(PROMPT, max_tokens=30, ignore_eos=True)
    assert {len(row.token_ids) for row in decode_rows(few)} == {1}
    assert {len(row.token_ids) for row in decode_rows(many)} >= {1, 5}
    alone = both(num_speculative_tokens=3)
    alone.send("a", PROMPT, max_tokens=30, ignore_eos=True)
    alone.run()
    assert max(len(row.token_ids) for row in decode_rows(alone)) == 4, "nothing runs beside it"


def test_drafts_that_are_never_right_leave_the_pipeline_full() -> None:
    core = both(speculative=replace(ADAPTIVE, min_match=1), max_model_len=1024, num_kv_blocks=300)
    for name in "ab":
        core.send(name, PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0, seed=ord(name))
    core.run()
    late = decode_rows(core, "a")[100:]
    assert sum(map(is_pending, late)) > 0.8 * len(late)


@pytest.mark.parametrize(
    ("settings", "num_drafts", "looks_up"),
    [
        ({}, 0, False),
        ({"num_speculative_tokens": 3}, 3, True),
        ({"speculative": SpeculativeConfig(method="ngram")}, 4, True),
        ({"speculative": SpeculativeConfig(method="none"), "num_speculative_tokens": 2}, 2, False),
    ],
    ids=str,
)
def test_with_overlap_drafts_are_off_until_they_are_asked_for(
    settings: dict[str, Any], num_drafts: int, looks_up: bool
) -> None:
    """`auto` looks drafts up only for kernels with which they change no bit."""
    found = dict(
        max_model_len=128,
        num_kv_blocks=64,
        vocab_size=32,
        eos_token_ids=(),
        dtype="none",
        device="none",
        kernels="fake",
        num_threads=1,
    )
    asked = EngineConfig(overlap=True, **settings)
    resolved = ResolvedConfig.of(asked, drafts=True, unseen_drafts=True, **found)
    assert (resolved.num_speculative_tokens, resolved.looks_up_drafts) == (num_drafts, looks_up)


# --- ends, failures and memory, with drafts in flight ----------------------------------------------------------------


def until_drafts_fly(core: RecordingCore, request_id: str) -> None:
    """Run until a row with drafts of this request is in flight."""
    while not any(len(row.token_ids) > 1 for row in rows_of(core, request_id) if row.kind is RowKind.DECODE):
        core.keep(core.step())
    request = core._scheduler.find(request_id)
    assert request is not None
    assert request.stands_aside


def test_an_abort_with_drafts_in_flight_ends_the_request_at_once_and_drops_the_late_row() -> None:
    core = both(**FORCED)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True)
    core.send("b", PROMPT[:5], max_tokens=20, ignore_eos=True)
    until_drafts_fly(core, "a")
    core.keep(core.abort("a"))
    events = list(core.events["a"])
    core.send("a2", PROMPT[:3], max_tokens=9, ignore_eos=True)
    core.run()
    assert core.events["a"] == events
    assert core.finished("a").reason is FinishReason.ABORT
    assert core.tokens("b") == answer_alone(PROMPT[:5], max_tokens=20, ignore_eos=True)
    assert core.tokens("a2") == answer_alone(PROMPT[:3], max_tokens=9, ignore_eos=True)
    check_nothing_is_left(core)


def test_an_id_that_is_used_again_does_not_get_the_late_row_with_drafts() -> None:
    core = both(**FORCED)
    core.send("a", PROMPT, max_tokens=50, ignore_eos=True)
    until_drafts_fly(core, "a")
    core.keep(core.abort("a"))
    core.events.clear()
    core.send("a", [9, 9], max_tokens=9, ignore_eos=True)
    core.run()
    assert core.tokens("a") == answer_alone([9, 9], max_tokens=9, ignore_eos=True)
    check_nothing_is_left(core)


def test_a_deadline_with_drafts_in_flight_ends_the_request_once() -> None:
    core = both(tick_ms=100, **FORCED)
    core.send("a", PROMPT, max_tokens=200, ignore_eos=True, timeout_s=1.05)
    core.send("b", PROMPT[:5], max_tokens=60, ignore_eos=True)
    until_drafts_fly(core, "a")
    core.run()
    assert [type(event) for event in core.events["a"] if isinstance(event, Failed | Finished)] == [Failed]
    answer = answer_alone(PROMPT, max_tokens=200, ignore_eos=True)
    assert core.tokens("a") == answer[: len(core.tokens("a"))]
    assert core.tokens("b") == answer_alone(PROMPT[:5], max_tokens=60, ignore_eos=True)
    check_nothing_is_left(core)


def test_a_preemption_with_drafts_in_flight_discards_them_and_samples_the_same_again() -> None:
    scheduler = SchedulerConfig(reserve_mode="prompt", watermark_blocks=0, preempt_policy="lifo")
    core = both(num_kv_blocks=24, block_size=2, scheduler=scheduler, **FORCED)
    discarded: list[ScheduledRequest] = []
    discard = core._scheduler.discard

    def watched(row: ScheduledRequest) -> None:
        discarded.append(row)
        discard(row)

    core._scheduler.discard = watched  # type: ignore[method-assign]
    for i in range(5):
        core.send(f"r{i}", [1 + i] * (4 + i), max_tokens=28, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions
    assert any(len(row.token_ids) > 1 for row in discarded)
    for i in range(5):
        assert core.tokens(f"r{i}") == answer_alone([1 + i] * (4 + i), max_tokens=28, ignore_eos=True)
    check_nothing_is_left(core)


def test_a_step_lost_at_collect_fails_its_rows_with_drafts_and_no_others() -> None:
    core = both(**FORCED)
    core.send("bad", PROMPT, max_tokens=50, ignore_eos=True)
    until_drafts_fly(core, "bad")
    collect = core._executor.collect

    def lost() -> StepOutput:
        core._executor.collect = collect  # type: ignore[method-assign]
        collect()
        raise RuntimeError("lost on the way")

    core._executor.collect = lost  # type: ignore[method-assign]
    core.send("good", PROMPT[:5], max_tokens=12, ignore_eos=True)
    core.run()
    last = core.events["bad"][-1]
    assert isinstance(last, Failed)
    assert last.message == "lost on the way"
    assert core.tokens("good") == answer_alone(PROMPT[:5], max_tokens=12, ignore_eos=True)
    check_nothing_is_left(core)


def test_a_row_with_drafts_that_fails_alone_leaves_its_neighbours_untouched() -> None:
    core = both(failing=no_logit_for_bad, **FORCED)
    check_bad_fails_alone(core)
    check_nothing_is_left(core)


# --- where the time goes ---------------------------------------------------------------------------------------------

COSTS = StepCosts((1, 64), (0.010, 0.073))
"""A step takes 10 ms, and 1 ms for each token after the first."""


class NamingTimes(WallTimes):
    """Accounts that note who is said to have stood aside, once for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[str] = []

    def step(self, took: Shares, chunks: Sequence[Chunk], costs: Costs, now: float, aside: Sequence[str] = ()) -> None:
        self.named += aside
        super().step(took, chunks, costs, now, aside)


def test_the_time_in_which_a_row_stands_aside_is_its_own() -> None:
    """Its neighbours made no step of its own longer: it waited for its own drafts. See also test_wall_times."""
    core = TimedCore(
        COSTS,
        overlap=True,
        num_speculative_tokens=4,
        max_num_batched_tokens=128,
        num_kv_blocks=300,
        speculative=replace(EAGER, min_match=4),
    )
    times = core._wall_times = NamingTimes()
    core.send("copies", [7] * 8, max_tokens=30, ignore_eos=True, allowed_token_ids=(7,))
    for i in range(6):
        core.send(f"r{i}", [1 + i, 30 - i], max_tokens=60, ignore_eos=True)
    core.run()
    numbers = [number for number, plan in enumerate(core.plans) if "copies" in {row.request_id for row in plan.rows}]
    left_out = numbers[-1] + 1 - numbers[0] - len(numbers)
    assert left_out > 3
    assert times.named.count("copies") in (left_out, left_out + 1), "it may end while one is in flight"
    found = core.finished("copies").times
    assert found is not None
    assert found.seconds[TimeCause.DECODE] > (left_out + len(numbers) - 1) * 0.010


@pytest.mark.parametrize("overlap", [False, True])
def test_the_step_time_model_learns_from_steps_that_are_read_before_the_next_is_planned(overlap: bool) -> None:
    twice = StepCosts((1, 64), (0.020, 0.146))
    core = TimedCore(
        COSTS,
        believed=twice,
        overlap=overlap,
        num_speculative_tokens=4,
        max_num_batched_tokens=64,
        max_model_len=2048,
        num_kv_blocks=600,
        speculative=EAGER,
        reply=REPEATED * 8,
    )
    core.send("a", [2, 7], max_tokens=700, ignore_eos=True)
    core.run()
    correction = core.load().step_times
    assert correction is not None
    assert 0.45 < correction.scale < 0.75


# --- what it wins, on a device that computes by itself ---------------------------------------------------------------


class DeviceCore(RecordingCore):
    """A core whose device computes a step in 5 ms and 0.05 ms for each token, while the host needs 1 ms to plan one."""

    def __init__(self, **overrides: Any) -> None:
        self._ends: deque[float] = deque()
        super().__init__(tick_ms=1.0, **{"max_num_batched_tokens": 64, "max_model_len": 1024, **overrides})
        collect = self._executor.collect

        def waited() -> StepOutput:
            self.now = max(self.now, self._ends.popleft())
            return collect()

        self._executor.collect = waited  # type: ignore[method-assign]
        self._free_at = 0.0

    def _record(self, plan: StepPlan) -> None:
        super()._record(plan)
        self._free_at = max(self.now, self._free_at) + 0.005 + 0.00005 * plan.num_tokens
        self._ends.append(self._free_at)

    def seconds_until_end(self) -> dict[str, float]:
        """Run, and return when each request ended."""
        ends: dict[str, float] = {}
        while self.has_work:
            ends |= {event.request_id: self.now for event in self.keep(self.step()) if isinstance(event, Finished)}
        return ends


def four_loops(**settings: Any) -> dict[tuple[bool, bool], DeviceCore]:
    """Cores by (overlap, drafts)."""
    return {
        (overlap, drafts): DeviceCore(
            overlap=overlap,
            num_speculative_tokens=4 if drafts else 0,
            speculative=replace(ADAPTIVE, method="suffix" if drafts else "none", free_tokens=128),
            num_kv_blocks=800,
            **settings,
        )
        for overlap in (False, True)
        for drafts in (False, True)
    }


def test_a_stream_alone_has_the_gain_of_drafts_where_they_are_right_and_that_of_overlap_elsewhere() -> None:
    new, known = random.Random(1).choices(range(1, 32), k=150), [5, 9, 2, 6, 11, 30] * 25
    took = {}
    for loop, core in four_loops(reply=[*new, *known]).items():
        core.send("a", [2, 7], max_tokens=300, ignore_eos=True)
        took[loop] = core.seconds_until_end()["a"]
        assert core.tokens("a") == [*new, *known]
    assert took[True, True] < 0.95 * min(took[True, False], took[False, True])


def test_a_stream_that_copies_is_faster_and_those_beside_it_keep_the_pace_of_overlap() -> None:
    took: dict[tuple[bool, bool], dict[str, float]] = {}
    for loop, core in four_loops().items():
        core.send("copies", [7] * 8, max_tokens=150, ignore_eos=True, allowed_token_ids=(7,))
        for i in range(6):
            core.send(f"r{i}", [1 + i, 30 - i, 3], max_tokens=150, ignore_eos=True)
        took[loop] = core.seconds_until_end()
    others = {loop: max(end for name, end in ends.items() if name != "copies") for loop, ends in took.items()}
    assert others[True, True] <= 1.02 * others[True, False]
    assert others[True, True] < 0.9 * others[False, True]
    assert took[True, True]["copies"] < 0.8 * took[True, False]["copies"]


def test_a_step_beside_a_row_that_stands_aside_keeps_to_its_target_too() -> None:
    """The row has none in the step, and still waits for its end: another request's longer target would hold it up."""
    costs = StepCosts((1, 512), (0.010, 0.521))
    targets, sizes = Targets(tpot_ms=50), {"max_num_batched_tokens": 512, "max_prefill_tokens": 512}
    core = TimedCore(costs, overlap=True, targets=targets, max_model_len=4096, num_kv_blocks=2000, **sizes)
    core.send("urgent", [1, 2, 3], max_tokens=50, ignore_eos=True)
    core.send("patient", [7, 8, 9], max_tokens=50, ignore_eos=True, tpot_ms=500)
    while min(len(core.tokens(name)) for name in ("urgent", "patient")) < 3:
        core.keep(core.step())
    core.send("long", [1 + i * i % 29 for i in range(2000)], max_tokens=1)
    core._scheduler.await_token(core._scheduler.decoding["urgent"])
    patient, chunk = core._scheduler.plan(core.now).rows
    assert (patient.request.request_id, chunk.request.request_id) == ("patient", "long")
    work = decode_work(1, patient.start).plus(chunk_work(0, chunk.num_tokens, last=False))
    assert 0.04 < costs.seconds(work) <= 0.05
