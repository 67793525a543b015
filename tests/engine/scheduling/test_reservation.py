"""Contracts of the planner's modes, reservations and preemptions. Long: a test for each Sx-Rn defect."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.config import ConfigError, SchedulerConfig
from engine.protocol import SamplingParams, Scheduled, Submission
from engine.scheduling.request import Request, create_request
from engine.scheduling.reservation import ReserveRatio, reserved_tokens
from engine.step import RowKind, StepPlan
from tests.support.engines import RecordingCore, answer_alone, resolved_config


def policy(**settings: object) -> SchedulerConfig:
    return SchedulerConfig(**{"chunk_align": 1, **settings})


def prompt_only(**settings: object) -> SchedulerConfig:
    """Admits whatever prompt fits, so that memory runs out."""
    return policy(reserve_mode="prompt", watermark_blocks=0, **settings)


def kinds(plan: StepPlan) -> str:
    """`d` for each decode row, `p` for each chunk."""
    return "".join("d" if row.kind is RowKind.DECODE else "p" for row in plan.rows)


def chunks_of(core: RecordingCore, request_id: str) -> list[int]:
    rows = [row for plan in core.plans for row in plan.rows if row.request_id == request_id]
    return [len(row.token_ids) for row in rows if row.kind is not RowKind.DECODE]


def preempted(core: RecordingCore) -> set[str]:
    """Requests whose prompt was computed from the beginning, or a cached prefix, more than once."""
    lasts = [row.request_id for plan in core.plans for row in plan.rows if row.kind is RowKind.LAST]
    return {name for name in lasts if lasts.count(name) > 1}


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_a_chunk_inside_its_prompt_ends_at_a_block_boundary() -> None:
    core = RecordingCore(max_num_batched_tokens=10, max_prefill_tokens=10, scheduler=SchedulerConfig())
    core.send("a", range(1, 31), max_tokens=1)
    core.run()
    assert chunks_of(core, "a") == [8, 8, 8, 6]


def test_alignment_never_starves_a_prompt_whose_room_is_smaller_than_a_block() -> None:
    """Beside eight decode rows the step has two tokens left: rounding them down to none would never end the prompt."""
    core = RecordingCore(
        max_num_batched_tokens=10, max_prefill_tokens=10, max_num_seqs=9, num_kv_blocks=200, scheduler=SchedulerConfig()
    )
    for i in range(8):
        core.send(f"d{i}", [i + 1], max_tokens=40, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [5] * 20, max_tokens=1)
    for _ in range(15):
        core.keep(core.step())
    assert core.tokens("long")


def test_the_threshold_caps_one_prompt_and_leaves_room_for_the_next() -> None:
    core = RecordingCore(
        max_num_batched_tokens=32,
        max_prefill_tokens=32,
        scheduler=policy(long_prefill_token_threshold=8, max_partial_prefills=2),
    )
    core.send("long", [1] * 24, max_tokens=1)
    core.send("short", [2] * 6, max_tokens=1)
    core.keep(core.step())
    assert [len(row.token_ids) for row in core.plans[0].rows] == [8, 6]


def test_with_one_partial_prefill_a_second_long_prompt_waits_but_a_short_one_fills_the_step() -> None:
    """S5-R17: the tail chunk ran alone although a shorter request fitted beside it."""
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=16, scheduler=policy(), num_kv_blocks=100)
    core.send("first", [1] * 20, max_tokens=1)
    core.send("short", [2] * 5, max_tokens=1)
    core.send("long", [3] * 40, max_tokens=1)
    core.run()
    second = [(row.request_id, len(row.token_ids)) for row in core.plans[1].rows]
    assert second == [("first", 4), ("short", 5), ("long", 7)]
    partial = [{r.request_id for r in plan.rows if r.kind is RowKind.MIDDLE} for plan in core.plans]
    assert max(len(names) for names in partial) == 1


def halving(context: int, **settings: Any) -> SchedulerConfig:
    return policy(chunk_halving_context=context, chunk_align=1, **settings)


def test_chunks_shrink_with_their_context_so_that_late_ones_take_no_longer() -> None:
    """At a context of 1,250 tokens a step of 256 took 577 ms where the first took 412, and running streams with it."""
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=32, num_kv_blocks=200, scheduler=halving(32))
    core.send("long", [1] * 96, max_tokens=1)
    core.run()
    assert chunks_of(core, "long") == [32, 16, 12, 11, 9, 9, 7]
    starts = [row.start for plan in core.plans for row in plan.rows]
    assert all(count * (1 + start / 32) <= 32 for start, count in zip(starts, chunks_of(core, "long"), strict=False))


def test_what_a_late_chunk_costs_is_not_given_to_the_next_prompt() -> None:
    """Sixteen tokens at a context of 32 cost as much as 32 at none: what is left is nothing, and not sixteen tokens."""
    core = RecordingCore(max_num_batched_tokens=32, max_prefill_tokens=32, num_kv_blocks=200, scheduler=halving(32))
    core.send("long", [1] * 52, max_tokens=1)
    core.send("short", [2] * 6, max_tokens=1)
    core.run()
    by_step = [[(row.request_id, len(row.token_ids)) for row in plan.rows] for plan in core.plans]
    assert by_step[:3] == [[("long", 32)], [("long", 16)], [("long", 4), ("short", 6)]]


@pytest.mark.parametrize("settings", [{}, {"chunk_boundary": "request_local", "max_partial_prefills": 0}])
def test_a_prompt_goes_on_by_a_block_however_long_its_context(settings: dict[str, Any]) -> None:
    core = RecordingCore(
        max_num_batched_tokens=16, max_prefill_tokens=8, num_kv_blocks=200, scheduler=halving(1, **settings)
    )
    core.send("long", [1] * 40, max_tokens=1)
    core.run()
    assert set(chunks_of(core, "long")[1:]) == {4}


@pytest.mark.parametrize("neighbours", [0, 3])
def test_request_local_chunks_that_shrink_depend_on_the_request_alone(neighbours: int) -> None:
    core = RecordingCore(
        max_num_batched_tokens=40,
        max_prefill_tokens=32,
        num_kv_blocks=200,
        scheduler=halving(32, chunk_boundary="request_local", max_partial_prefills=0),
        enable_prefix_caching=False,
    )
    for i in range(neighbours):
        core.send(f"n{i}", [i + 1] * (7 + 9 * i), max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    core.send("a", [9] * 80, max_tokens=1)
    core.run()
    assert chunks_of(core, "a") == [32, 16, 12, 11, 9]


@pytest.mark.parametrize("neighbours", [0, 3])
def test_request_local_chunks_depend_on_the_request_alone(neighbours: int) -> None:
    """S1-B18: [80] at 32 gives 32, 32, 16 whoever else is there."""
    local = policy(chunk_boundary="request_local", max_partial_prefills=0)
    core = RecordingCore(
        max_num_batched_tokens=40,
        max_prefill_tokens=32,
        num_kv_blocks=200,
        scheduler=local,
        enable_prefix_caching=False,
    )
    for i in range(neighbours):
        core.send(f"n{i}", [i + 1] * (7 + 9 * i), max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    core.send("a", [9] * 80, max_tokens=1)
    core.run()
    assert chunks_of(core, "a") == [32, 32, 16]


def test_a_request_local_chunk_fits_beside_as_many_decode_rows_as_there_are_seats() -> None:
    """S1-B18: a chunk as long as the whole step would wait until nobody decodes any more."""
    local = policy(chunk_boundary="request_local", max_partial_prefills=0)
    core = RecordingCore(max_num_seqs=4, max_num_batched_tokens=12, max_prefill_tokens=12, scheduler=local)
    core.send("stream", [1, 2], max_tokens=40, ignore_eos=True)
    core.keep(core.step())
    core.send("long", [3] * 24, max_tokens=1)
    core.run()
    assert chunks_of(core, "long") == [8, 8, 8]
    assert [kinds(plan) for plan in core.plans[1:4]] == ["dp"] * 3


@pytest.mark.parametrize(("most", "at_a_time"), [(1, 1), (2, 2), (0, 4)])
def test_no_more_prompts_are_partly_computed_than_the_setting_says(most: int, at_a_time: int) -> None:
    """S5-R3: eight prompts that shared the budget each got an eighth of it, and none got on."""
    capped = policy(long_prefill_token_threshold=4, max_partial_prefills=most)
    core = RecordingCore(max_num_batched_tokens=64, max_prefill_tokens=64, num_kv_blocks=200, scheduler=capped)
    for i in range(4):
        core.send(f"r{i}", [i + 1] * 40, max_tokens=1)
    core.run()
    assert max(sum(row.kind is RowKind.MIDDLE for row in plan.rows) for plan in core.plans) == at_a_time


def test_a_prompt_that_is_partly_computed_has_a_seat() -> None:
    """S4-R1: a hundred partial prompts at max_num_seqs 4 made a step of a hundred rows."""
    capped = policy(long_prefill_token_threshold=4, max_partial_prefills=0)
    core = RecordingCore(
        max_num_seqs=4, max_num_batched_tokens=64, max_prefill_tokens=64, num_kv_blocks=2000, scheduler=capped
    )
    for i in range(100):
        core.send(f"r{i}", [i % 31 + 1] * 20, max_tokens=2, ignore_eos=True)
    core.run()
    assert max(len(plan.rows) for plan in core.plans) == 4


# --- batch modes -----------------------------------------------------------------------------------------------------


def traffic(core: RecordingCore) -> None:
    """Two streams that decode, then prompts that keep coming."""
    for name in ("a", "b"):
        core.send(name, [1, 2], max_tokens=30, ignore_eos=True)
    core.keep(core.step())
    for i in range(6):
        core.send(f"p{i}", [i + 1] * 20, max_tokens=1)
    core.run()


def test_mixed_steps_carry_every_decode_row_and_a_chunk() -> None:
    core = RecordingCore(max_num_batched_tokens=12, max_prefill_tokens=8, scheduler=policy())
    traffic(core)
    assert all(kinds(plan).startswith("dd") for plan in core.plans[1:20])
    assert any("p" in kinds(plan) for plan in core.plans[1:])


def test_prefill_first_steps_are_pure_and_decoding_waits_no_longer_than_its_bound() -> None:
    """S5-R14: under steady arrivals decoding waited for ever."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=12,
        max_prefill_tokens=8,
        scheduler=policy(batch_mode="prefill_first", decode_starve_ms=30),
    )
    traffic(core)
    seen = [kinds(plan) for plan in core.plans[1:]]
    assert not any("d" in kind and "p" in kind for kind in seen)
    runs = "".join("d" if "d" in kind else "p" for kind in seen).split("d")
    assert max(len(run) for run in runs) == 3, "three steps of 10 ms, then a decode step is due"


def test_decode_first_holds_prompts_back_and_no_longer_than_its_bound() -> None:
    """S1-R9: with somebody always about to finish, prompts waited for ever."""
    core = RecordingCore(
        tick_ms=10,
        max_num_batched_tokens=12,
        max_prefill_tokens=8,
        scheduler=policy(batch_mode="decode_first", prefill_starve_ms=50),
    )
    traffic(core)
    prefills = [i for i, plan in enumerate(core.plans[1:]) if "p" in kinds(plan)]
    assert 4 <= prefills[0] <= 6, "the first prompt waits while others decode, and for 50 ms"
    assert all(b - a <= 6 for a, b in pairwise(prefills) if b < 28)


def test_a_request_about_to_finish_has_the_step_to_itself() -> None:
    core = RecordingCore(max_num_batched_tokens=12, max_prefill_tokens=8, scheduler=policy(decode_finish_tokens=3))
    core.send("a", [1, 2], max_tokens=6, ignore_eos=True)
    core.keep(core.step())
    core.send("p", [3] * 40, max_tokens=1)
    core.run()
    assert [kinds(plan) for plan in core.plans[1:6]] == ["dp", "dp", "d", "d", "d"]


# --- reservation -----------------------------------------------------------------------------------------------------


def running_after_admission(scheduler: SchedulerConfig) -> int:
    """How many of eight requests of 8 prompt + 24 answer tokens run at once in 32 blocks of 4."""
    core = RecordingCore(
        num_kv_blocks=32,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=scheduler,
    )
    for i in range(8):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=24, ignore_eos=True)
    for _ in range(4):
        core.keep(core.step())
    running = core.load().num_running
    core.run()
    assert all(len(core.tokens(f"r{i}")) == 24 for i in range(8))
    return running


def test_the_less_is_reserved_the_more_requests_run() -> None:
    full = running_after_admission(policy(reserve_mode="full", preempt_policy="none"))
    ratio = running_after_admission(policy(reserve_mode="ratio", ratio_init=0.3))
    prompt = running_after_admission(prompt_only())
    assert full == 4
    assert full < ratio < prompt == 8


def test_full_reservation_never_preempts() -> None:
    core = RecordingCore(num_kv_blocks=12, scheduler=policy(reserve_mode="full", preempt_policy="none"))
    for i in range(8):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=24, ignore_eos=True)
    core.run()
    assert core.load().num_preemptions == 0


def test_what_a_request_was_promised_is_given_back_when_it_is_aborted() -> None:
    """I-15: promises that outlived their requests would add up until nobody is admitted any more."""
    core = RecordingCore(num_kv_blocks=32, scheduler=policy(reserve_mode="full", preempt_policy="none"))
    for i in range(10):
        core.send(f"a{i}", [1] * 8, max_tokens=24, ignore_eos=True)
        core.keep(core.step())
        core.keep(core.abort(f"a{i}"))
    for i in range(4):
        core.send(f"r{i}", [i + 2] * 8, max_tokens=24, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 4


def test_a_lone_request_is_admitted_whatever_the_reservation_says() -> None:
    """S5-R11: its own reservation kept the only request out for ever."""
    ways: list[dict[str, Any]] = [{}, {"reserve_mode": "ratio"}, {"reserve_mode": "prompt", "watermark_blocks": 8}]
    for scheduler in (policy(**way) for way in ways):
        core = RecordingCore(num_kv_blocks=8, scheduler=scheduler)
        core.send("a", [1] * 20, max_tokens=13, ignore_eos=True)
        core.run()
        assert len(core.tokens("a")) == 13


def test_an_answer_is_clipped_once_for_admission() -> None:
    """S5-R1 clipped twice; S5-R12 reserved a whole answer for a request that had most of it."""
    core = RecordingCore(
        num_kv_blocks=20,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=policy(reserve_mode="ratio", reserve_clip=4),
    )
    for i in range(5):  # 2 blocks of prompt + 1 of clipped answer each, with all earlier ones counted in full
        core.send(f"r{i}", [i + 1] * 8, max_tokens=60, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 5


def test_answers_that_are_admitted_in_one_step_are_each_reserved() -> None:
    """S5-R1: the sum was clipped a second time, so that the third request of a step cost no answer at all."""
    core = RecordingCore(
        num_kv_blocks=12,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        scheduler=policy(reserve_mode="ratio", reserve_clip=4),
    )
    for i in range(6):  # the nth finds 12 - 2n blocks, and needs 2 for its prompt and n + 1 for all answers
        core.send(f"r{i}", [i + 1] * 8, max_tokens=20, ignore_eos=True)
    core.keep(core.step())
    assert core.load().num_running == 4


def test_a_preempted_request_reserves_what_is_left_of_its_answer() -> None:
    """S5-R12: it reserved the whole answer again, and waited for memory that it could never use."""
    submission = Submission("a", (1, 2, 3), SamplingParams(max_tokens=20))
    request = create_request(submission, resolved_config(), 0)
    request.token_ids += [5] * 15
    assert (reserved_tokens(request, 4096), reserved_tokens(request, 3)) == (5, 3)


# --- the ratio -------------------------------------------------------------------------------------------------------


def test_the_ratio_falls_with_every_decode_step_also_while_requests_wait() -> None:
    """S5-R2: decay that waited for an empty queue never came under load, and the queue never drained."""
    core = RecordingCore(max_num_seqs=1, scheduler=policy(ratio_decay_steps=10))
    for name in ("a", "b"):
        core.send(name, [1, 2], max_tokens=9, ignore_eos=True)
    seen = []
    for _ in range(5):
        core.keep(core.step())
        seen.append(core.load().reserve_ratio)
    assert seen[0] == 0.7, "a step without decode rows"
    assert all(a > b for a, b in pairwise(seen))


def test_the_ratio_snaps_back_to_its_least_value_after_a_preemption_left_it_below() -> None:
    """S5-R8."""
    ratio = ReserveRatio(SchedulerConfig())
    ratio.value = 0.05
    ratio.after_step(decoded=True, prefilled=False)
    assert ratio.value == 0.21


def test_an_idle_engine_starts_over_with_the_first_ratio() -> None:
    """S5-R9: the reset was not wired."""
    core = RecordingCore(scheduler=policy(ratio_decay_steps=10))
    core.send("a", [1, 2], max_tokens=9, ignore_eos=True)
    core.run()
    assert core.load().reserve_ratio == 0.7


def test_decay_on_decode_only_ignores_mixed_steps() -> None:
    for on, falls in (("decode_only", False), ("any_decode", True)):
        ratio = ReserveRatio(SchedulerConfig(ratio_decay_on=on))
        ratio.after_step(decoded=True, prefilled=True)
        assert (ratio.value < 0.7) is falls


def test_after_a_preemption_the_ratio_is_what_the_remaining_answers_used() -> None:
    core = RecordingCore(
        num_kv_blocks=9, enable_prefix_caching=False, max_num_batched_tokens=64, scheduler=prompt_only(retract_steps=3)
    )
    for name in ("a", "b"):
        core.send(name, [ord(name) % 31] * 8, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    decoded = len(core.tokens("a")) - 1  # at the plan, before this step's token
    assert core.load().reserve_ratio == pytest.approx((decoded + 3 * 1) / (20 + 1))


# --- preemption ------------------------------------------------------------------------------------------------------


def tight(scheduler: SchedulerConfig, prompts: dict[str, int], max_tokens: int = 20) -> RecordingCore:
    core = RecordingCore(
        num_kv_blocks=12,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        scheduler=scheduler,
        enable_prefix_caching=False,
    )
    for i, (name, length) in enumerate(prompts.items()):
        core.send(name, [i + 1] * length, max_tokens=max_tokens, ignore_eos=True)
    core.run()
    for i, (name, length) in enumerate(prompts.items()):
        assert core.tokens(name) == answer_alone([i + 1] * length, max_tokens=max_tokens, ignore_eos=True)
        scheduled = [event for event in core.events[name] if isinstance(event, Scheduled)]
        assert len(scheduled) == 1, "a preemption does not schedule twice"
    return core


@pytest.mark.parametrize("how", ["lifo", "retract"])
@pytest.mark.parametrize("requeue", ["arrival", "front", "back"])
def test_whoever_is_preempted_goes_on_with_the_same_tokens(how: str, requeue: str) -> None:
    """S4-R9, R10: the prefill target of a preempted request is prompt and answer so far, not the prompt."""
    core = tight(prompt_only(preempt_policy=how, requeue=requeue), {"a": 8, "b": 8, "c": 8, "d": 8})
    assert core.load().num_preemptions > 0


def test_the_oldest_request_is_never_preempted() -> None:
    for how in ("lifo", "retract"):
        assert "a" not in preempted(tight(prompt_only(preempt_policy=how), {"a": 12, "b": 4, "c": 4, "d": 4}))


def test_retract_takes_the_shortest_answer_and_then_the_longest_prompt() -> None:
    core = RecordingCore(
        num_kv_blocks=12,
        max_num_batched_tokens=64,
        max_prefill_tokens=64,
        scheduler=prompt_only(),
        enable_prefix_caching=False,
    )
    for i, (name, length) in enumerate({"elder": 8, "short prompt": 8, "long prompt": 12}.items()):
        core.send(name, [i + 1] * length, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert core.waiting == ["long prompt"]


def test_retract_takes_the_shorter_answer_whatever_the_prompts() -> None:
    """I-18: whoever is furthest has most to compute again."""
    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(), enable_prefix_caching=False)
    core.send("elder", [1] * 8, max_tokens=20, ignore_eos=True)
    core.send("further", [2] * 12, max_tokens=20, ignore_eos=True)
    for _ in range(3):
        core.keep(core.step())
    core.send("latest", [3] * 4, max_tokens=20, ignore_eos=True)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert core.waiting == ["latest"]


@pytest.mark.parametrize(
    ("settings", "queue"),
    [
        ({}, ["victim", "waits"]),
        ({"requeue": "front"}, ["victim", "waits"]),
        ({"requeue": "back"}, ["waits", "victim"]),
    ],
)
def test_a_step_that_preempts_admits_nobody_and_the_victim_keeps_its_place(
    settings: dict[str, object], queue: list[str]
) -> None:
    """I-24, S5-R13: a newcomer would take what the victim gave up for others, and old work would wait behind it."""
    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(**settings), enable_prefix_caching=False)
    core.send("elder", [1] * 8, max_tokens=30, ignore_eos=True)
    core.send("victim", [2] * 16, max_tokens=30, ignore_eos=True)
    while core.load().num_held_blocks < 10:
        core.keep(core.step())
    core.send("waits", [3] * 16, max_tokens=1)
    while not core.load().num_preemptions:
        core.keep(core.step())
    assert [row.request_id for row in core.plans[-1].rows] == ["elder"]
    assert core.waiting == queue


def test_an_answer_that_is_computed_again_in_chunks_samples_after_the_last_one_only() -> None:
    """S4-R10: a chunk that ended between prompt and answer was taken for the last, and sampled without its KV."""
    core = RecordingCore(
        num_kv_blocks=16,
        max_num_batched_tokens=14,
        max_prefill_tokens=12,
        scheduler=prompt_only(),
        enable_prefix_caching=False,
    )
    for i, name in enumerate(("elder", "victim")):
        core.send(name, [i + 1] * 10, max_tokens=40, ignore_eos=True)
    core.run()
    again = chunks_of(core, "victim")[-3:]
    assert again[:2] == [12, 12], "the first ends behind the prompt of 10, and inside the answer"
    for i, name in enumerate(("elder", "victim")):
        assert core.tokens(name) == answer_alone([i + 1] * 10, max_tokens=40, ignore_eos=True)


def test_younger_answers_never_take_the_last_block_from_the_oldest_prompt() -> None:
    """I-21: while answers grew into the memory that its prompt was admitted on, the oldest request stood still."""
    core = RecordingCore(
        num_kv_blocks=20,
        max_num_batched_tokens=64,
        max_prefill_tokens=8,
        scheduler=prompt_only(long_prefill_token_threshold=4, max_partial_prefills=0),
        enable_prefix_caching=False,
    )
    core.send("elder", [1] * 60, max_tokens=1)
    for i in range(3):
        core.send(f"r{i}", [i + 2] * 4, max_tokens=40, ignore_eos=True)
    core.run()
    steps = [i for i, plan in enumerate(core.plans) if any(row.request_id == "elder" for row in plan.rows)]
    assert steps == list(range(15))


def test_a_victim_has_no_row_in_the_step_that_takes_its_memory() -> None:
    """S5-R6, R7: the requester was its own victim, and victims kept rows that were built before."""
    core = tight(prompt_only(), {"a": 8, "b": 8, "c": 8, "d": 8})  # the executor verifies every slot that a row reads
    assert core.load().num_preemptions > 0
    for plan in core.plans:
        blocks = [block for row in plan.rows for block in row.block_ids]
        assert len(blocks) == len(set(blocks)), "without a prefix cache no block is in two rows"


def test_a_failed_step_after_a_preemption_leaks_nothing() -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id in (12, 13, 14):
            raise RuntimeError("injected")

    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(), before_step=fail, max_num_batched_tokens=64)
    for i in range(6):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=20, ignore_eos=True)
    core.run()
    assert core.load().num_held_blocks == 0


# --- admission order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "first"), [("strict", "large"), ("bypass", "small")])
def test_requests_that_fit_overtake_one_that_does_not_only_in_bypass(order: str, first: str) -> None:
    core = RecordingCore(num_kv_blocks=12, scheduler=prompt_only(admission_order=order), enable_prefix_caching=False)
    core.send("running", [1] * 24, max_tokens=8, ignore_eos=True)
    core.keep(core.step())
    core.send("large", [2] * 30, max_tokens=1)
    core.send("small", [3] * 4, max_tokens=1)
    core.run()
    order_seen = [row.request_id for plan in core.plans for row in plan.rows if row.request_id != "running"]
    assert order_seen[0] == first


def test_a_request_is_overtaken_no_more_often_than_its_bound() -> None:
    core = RecordingCore(
        num_kv_blocks=12, scheduler=prompt_only(admission_order="bypass", max_overtakes=3), enable_prefix_caching=False
    )
    core.send("running", [1] * 24, max_tokens=16, ignore_eos=True)
    core.keep(core.step())
    core.send("large", [2] * 30, max_tokens=1)
    for i in range(10):
        core.send(f"s{i}", [3] * 4, max_tokens=1)
    core.run()
    order = list(
        dict.fromkeys(row.request_id for plan in core.plans for row in plan.rows if row.request_id != "running")
    )
    assert order[:4] == ["s0", "s1", "s2", "large"]


# --- the config ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reserve_mode": "full"}, "reserve_mode is full, .* retract: every request has memory for its whole life"),
        ({"preempt_policy": "none"}, "reserve_mode is learned, .* none: more requests are admitted than fit for ever"),
        ({"chunk_boundary": "request_local"}, "request_local, but scheduler.max_partial_prefills is 1"),
        ({"ratio_min": 0.9}, r"ratio_min \(0.9\) must not exceed ratio_init \(0.7\)"),
        ({"ratio_init": 0}, "ratio_init must be > 0, but it is 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_reason(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SchedulerConfig(**settings)


def test_a_plan_that_preempts_many_looks_at_each_row_no_oftener_than_one_that_preempts_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows were counted again for each victim, and the blocks of all victims before it: 16 of 512 took 8 ms."""
    looked = 0
    real = Request.num_decode_tokens.fget  # type: ignore[attr-defined]

    def counting(self: Request) -> int:
        nonlocal looked
        looked += 1
        return int(real(self))

    monkeypatch.setattr(Request, "num_decode_tokens", property(counting))
    counts = []
    for num_kv_blocks in (2 * 64 + 60, 2 * 64):
        core = RecordingCore(
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_prefill_tokens=512,
            enable_prefix_caching=False,
            scheduler=prompt_only(),
        )
        for i in range(64):
            core.send(f"r{i}", [i % 31 + 1] * 8, max_tokens=9, ignore_eos=True)
        core.keep(core.step())
        looked = 0
        core._scheduler.plan(core.now)
        counts.append(looked)
    assert len(core._scheduler.plan(core.now).preempted) == 22, "each yields two blocks and wants none: 64 / 3"
    assert counts[1] - counts[0] <= 2 * 22
