"""Scheduling by time: how long steps last beside streams, in which order prompts run, and that none waits for ever."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ConfigError, EngineConfig, SchedulerConfig, Targets
from engine.protocol import MAX_TARGET_MS, ErrorCode, Failed, Finished, RequestRejected, Token
from engine.scheduling.step_time import StepCosts
from engine.step import PaddedSizes, RowKind, StepPlan
from tests.support.engines import RecordingCore, TimedCore, answer_alone, policy

COSTS = StepCosts((1, 8, 64, 512), (0.010, 0.012, 0.030, 0.200), 0.0002, 1e-6, 4e-7)
LARGE = {
    "max_model_len": 8192,
    "num_kv_blocks": 4000,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_prefill_tokens": 512,
    "enable_prefix_caching": False,
}
PROMPT = tuple(range(1, 30)) * 200


def core_with(tpot_ms: float | None = None, ttft_ms: float | None = None, **overrides: Any) -> TimedCore:
    scheduler = overrides.pop("scheduler", policy(chunk_halving_context=0))
    costs = overrides.pop("costs", COSTS)
    return TimedCore(
        costs, scheduler=scheduler, targets=Targets(tpot_ms=tpot_ms, ttft_ms=ttft_ms), **{**LARGE, **overrides}
    )


def streams(core: TimedCore, count: int, max_tokens: int = 400) -> None:
    for number in range(count):
        core.send(f"stream {number}", PROMPT[:20], max_tokens=max_tokens, ignore_eos=True)
    while any(len(core.tokens(f"stream {number}")) < 2 for number in range(count)):
        core.keep(core.step())


def parts(plan: StepPlan) -> tuple[int, int]:
    """Return (decode rows, prefill tokens) of a step."""
    chunks = [row for row in plan.rows if row.kind is not RowKind.DECODE]
    return len(plan.rows) - len(chunks), sum(len(row.token_ids) for row in chunks)


def test_where_steps_are_padded_a_prompt_fills_what_its_step_takes_anyhow() -> None:
    """A step of 64 tokens takes longer than the target leaves, and so would one with a single token of the prompt."""
    costs = replace(COSTS, sizes=PaddedSizes((1, 2, 4, 8), (64, 128, 256, 512)))
    core = core_with(tpot_ms=20, costs=costs)
    streams(core, 4)
    core.send("long", PROMPT[:600], max_tokens=1)
    found = []
    while not core.tokens("long"):
        core.keep(core.step())
        found.append(parts(core.plans[-1]))
    assert set(found[:-1]) == {(4, 60)}


def first_token_at(core: TimedCore, *names: str) -> dict[str, float]:
    """Run to the end; return when each request had its first token."""
    found: dict[str, float] = {}
    while core.has_work:
        for event in core.keep(core.step()):
            if isinstance(event, Token):
                found.setdefault(event.request_id, core.now)
    return {name: found[name] for name in names}


# --- how long a step lasts --------------------------------------------------------------------------------------------


def test_beside_streams_a_step_takes_as_much_prefill_as_its_target_allows() -> None:
    core = core_with(tpot_ms=50)
    streams(core, 4)
    first = len(core.plans)
    core.send("long", PROMPT[:3000], max_tokens=1)
    while not core.tokens("long"):
        core.keep(core.step())
    steps = list(zip(core.plans, core.took, strict=True))[first:]
    mixed = [(plan, took) for plan, took in steps if parts(plan)[1]]
    assert mixed
    times = [took for _, took in mixed]
    assert max(times) <= 0.050 * (1 + 1e-9)
    assert min(times[:-1]) > 0.048  # one more token would not have fitted


def test_several_prompts_share_the_time_of_a_step() -> None:
    core = core_with(tpot_ms=50)
    streams(core, 4)
    first = len(core.plans)
    for number in range(20):
        core.send(f"short {number}", PROMPT[number : number + 40], max_tokens=1)
    core.run()
    mixed = [(plan, took) for plan, took in zip(core.plans, core.took, strict=True) if parts(plan)[0]][first:]
    assert max(sum(row.kind is RowKind.LAST for row in plan.rows) for plan, _ in mixed) > 1
    assert max(took for _, took in mixed) <= 0.050 * (1 + 1e-9)


def test_a_chunk_that_is_limited_by_time_ends_anywhere() -> None:
    """Regression: chunks ended with a block, and on a slow machine that left a third of the time unused."""
    core = core_with(tpot_ms=50, scheduler=SchedulerConfig(chunk_halving_context=0), block_size=64, num_kv_blocks=300)
    streams(core, 4)
    core.send("long", PROMPT[:3000], max_tokens=1)
    core.keep(core.step())
    assert 0.048 < core.took[-1] <= 0.050 * (1 + 1e-9)


def test_without_streams_a_step_takes_all_tokens_that_it_may() -> None:
    core = core_with(tpot_ms=50)
    core.send("long", PROMPT[:1000], max_tokens=1)
    core.run()
    assert [parts(plan) for plan in core.plans] == [(0, 512), (0, 488)]


def test_a_chunk_has_fewer_tokens_where_it_attends_to_more() -> None:
    core = core_with(tpot_ms=50, costs=replace(COSTS, attended_s=4e-6))
    streams(core, 2)
    first = len(core.plans)
    core.send("long", PROMPT[:3000], max_tokens=1)
    core.run()
    sizes = [size for decodes, size in map(parts, core.plans[first:]) if decodes and size]
    assert len(sizes) > 5
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-2] < sizes[0] / 2


def test_a_request_with_a_longer_target_of_its_own_leaves_more_time() -> None:
    sizes = {}
    for own in (None, 100.0):
        core = core_with(tpot_ms=50)
        core.send("stream", PROMPT[:20], max_tokens=200, ignore_eos=True, tpot_ms=own)
        while len(core.tokens("stream")) < 2:
            core.keep(core.step())
        core.send("long", PROMPT[:3000], max_tokens=1)
        core.keep(core.step())
        sizes[own] = parts(core.plans[-1])[1]
    assert sizes[100.0] > 1.8 * sizes[None]


def test_the_shortest_target_among_the_streams_counts() -> None:
    core = core_with(tpot_ms=50)
    core.send("patient", PROMPT[:20], max_tokens=200, ignore_eos=True, tpot_ms=500.0)
    streams(core, 1)
    core.send("long", PROMPT[:3000], max_tokens=1)
    core.keep(core.step())
    assert parts(core.plans[-1])[0] == 2
    assert core.took[-1] <= 0.050 * (1 + 1e-9)


@pytest.mark.parametrize(("targets", "error"), [
    ({"tpot_ms": 20.0}, "tpot_ms must be >= 50, this server's own target, but it is 20"),
    ({"ttft_ms": 900.0}, "ttft_ms is 900, but this server schedules by no such target"),
    ({"tpot_ms": 0.0}, "tpot_ms must be a positive number of milliseconds, but it is 0.0"),
    ({"tpot_ms": 1e308}, "tpot_ms must be at most 86400000 milliseconds, a day, but it is 1e[+]308"),
    ({"ttft_ms": 1e308}, "ttft_ms must be at most 86400000 milliseconds, a day, but it is 1e[+]308"),
])  # fmt: skip
def test_a_target_that_the_engine_cannot_keep_for_one_request_is_refused(targets: dict[str, float], error: str) -> None:
    core = core_with(tpot_ms=50)
    with pytest.raises(RequestRejected, match=error):
        core.send("mine", PROMPT[:20], **targets)


def test_the_longest_times_can_be_ordered() -> None:
    """Regression: a target of 1e306 ms was infinite in microseconds, and ended the engine."""
    longest = policy(priority_age_ms=365 * MAX_TARGET_MS)
    core = core_with(ttft_ms=MAX_TARGET_MS, tpot_ms=MAX_TARGET_MS, scheduler=longest)
    core.send("mine", PROMPT[:20], max_tokens=2, ttft_ms=float(MAX_TARGET_MS), timeout_s=sys.float_info.max)
    core.run()
    assert len(core.tokens("mine")) == 2
    for field in ("ttft_ms", "tpot_ms"):
        with pytest.raises(ConfigError, match=f"{field} must be <= 86400000"):
            Targets(**{field: 1e306})
    with pytest.raises(ConfigError, match="priority_age_ms must be <= 31536000000"):
        policy(priority_age_ms=1e306)


def test_prompts_advance_even_if_streams_alone_take_longer_than_their_target() -> None:
    core = core_with(tpot_ms=1)
    streams(core, 8, max_tokens=1000)
    core.send("long", PROMPT[:3000], max_tokens=1)
    first = len(core.plans)
    while core.tokens("long") == []:
        core.keep(core.step())
    assert len(core.plans) - first < 400
    assert all(size for _, size in map(parts, core.plans[first:]))


@pytest.mark.parametrize(("ttft_ms", "age_ms"), [(200.0, 60_000.0), (None, 200.0)])
def test_beside_streams_that_leave_little_a_late_prompt_gets_more_than_one_in_time(
    ttft_ms: float | None, age_ms: float
) -> None:
    """Otherwise a prompt of thousands of tokens would take minutes where streams just meet their target."""
    core = core_with(tpot_ms=20, ttft_ms=ttft_ms, scheduler=policy(chunk_halving_context=0, priority_age_ms=age_ms))
    streams(core, 16)
    began, first = core.now, len(core.plans)
    core.send("long", PROMPT[:1200], max_tokens=1)
    while not core.tokens("long"):
        core.keep(core.step())
    early, late = (
        max(took for took, at in zip(core.took[first:], core.began[first:], strict=True) if low <= at - began < high)
        for low, high in ((0.0, 0.2), (1.0, 99.0))
    )
    assert early <= 1.1 * 0.020 < 1.3 * 0.020 < late <= 1.6 * 0.020


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.1, 10.0),
    st.one_of(st.none(), st.floats(0.1, 500.0)),
    st.one_of(st.none(), st.floats(0.1, 5000.0)),
    st.integers(0, 2**32),
)
def test_all_requests_end_at_any_prediction_error_and_with_any_targets(
    error: float, tpot_ms: float | None, ttft_ms: float | None, seed: int
) -> None:
    """And their answers are those that they have without targets."""
    draw = random.Random(seed)
    believed = StepCosts(
        COSTS.knots, tuple(error * y for y in COSTS.curve_s), error * COSTS.sample_s, error * COSTS.key_s
    )
    core = core_with(
        tpot_ms, ttft_ms, believed=believed, noise=lambda: draw.uniform(0.7, 1.4),
        max_model_len=256, num_kv_blocks=draw.choice((40, 64, 200)), max_num_seqs=6,
        max_num_batched_tokens=draw.choice((24, 64)), max_prefill_tokens=64, enable_prefix_caching=True,
    )  # fmt: skip
    lengths = {f"r{number}": draw.choice((3, 20, 60, 120)) for number in range(12)}
    for number, (name, length) in enumerate(lengths.items()):
        core.send(
            name, PROMPT[number : number + length], max_tokens=draw.randint(1, 30), priority=draw.choice((0, 0, 1))
        )
        for _ in range(draw.randint(0, 4)):
            core.keep(core.step())
    core.run(4000)
    for number, (name, length) in enumerate(lengths.items()):
        alone = answer_alone(PROMPT[number : number + length], max_tokens=len(core.tokens(name)) or 1)
        assert core.tokens(name) == alone[: len(core.tokens(name))]


def test_the_same_view_gives_the_same_plan() -> None:
    core = core_with(tpot_ms=50, ttft_ms=1000)
    streams(core, 3)
    core.send("long", PROMPT[:3000], max_tokens=1)
    plans = [core._scheduler.plan(core.now) for _ in range(2)]
    assert plans[0] == plans[1]
    core._scheduler.plan(core.now + 100)
    assert core._scheduler.plan(core.now) == plans[0]


def test_the_model_learns_from_the_steps_of_this_engine() -> None:
    """It was told half of what steps take."""
    half = StepCosts(COSTS.knots, tuple(y / 2 for y in COSTS.curve_s), COSTS.sample_s / 2, COSTS.key_s / 2)
    core = core_with(tpot_ms=50, believed=half)
    streams(core, 4, max_tokens=2000)
    for number in range(6):
        core.send(f"long {number}", PROMPT[number : number + 2500], max_tokens=1)
    before = len(core.plans)
    while any(not core.tokens(f"long {number}") for number in range(6)):
        core.keep(core.step())
    took = [took for plan, took in zip(core.plans[before:], core.took[before:], strict=True) if all(parts(plan))]
    assert took[0] > 0.070
    assert max(took[-20:]) < 0.055


# --- the order of prompts ---------------------------------------------------------------------------------------------


def test_a_short_prompt_goes_before_a_long_one_that_came_a_little_earlier() -> None:
    for ttft_ms, order in ((None, ["long", "short"]), (2000.0, ["short", "long"])):
        core = core_with(ttft_ms=ttft_ms)
        core.send("long", PROMPT[:5000], max_tokens=1)
        core.send("short", PROMPT[:40], max_tokens=1)
        assert core.waiting == order


def test_a_short_prompt_need_not_wait_until_a_long_one_is_whole() -> None:
    core = core_with(ttft_ms=3000)
    core.send("long", PROMPT[:5000], max_tokens=1)
    core.keep(core.step())
    core.send("short", PROMPT[:40], max_tokens=1)
    at = first_token_at(core, "long", "short")
    assert at["short"] < 0.7 < at["long"]


def test_no_prompt_starves_however_many_short_ones_come() -> None:
    """A short prompt comes with every step, and each goes before the long one until its bound is over."""
    core = core_with(ttft_ms=200, scheduler=policy(chunk_halving_context=0, priority_age_ms=2000.0))
    core.send("long", PROMPT[:4000], max_tokens=1)
    number = 0
    while not core.tokens("long"):
        for _ in range(8):
            core.send(f"short {number}", PROMPT[number % 50 :][:128], max_tokens=1)
            number += 1
        core.keep(core.step())
        assert core.now < 12.0


def test_a_prompt_that_can_no_longer_be_in_time_lets_those_go_first_that_can() -> None:
    core = core_with(ttft_ms=1000, max_num_seqs=1, max_num_batched_tokens=512)
    core.send("running", PROMPT[:20], max_tokens=150, ignore_eos=True)
    core.keep(core.step())
    core.send("late", PROMPT[:40], max_tokens=1)
    while core.now < 1.3:
        core.keep(core.step())
    core.send("fresh", PROMPT[1:41], max_tokens=1)
    core.keep(core.step())
    assert core.waiting == ["fresh", "late"]
    at = first_token_at(core, "fresh", "late")
    assert at["fresh"] < at["late"]


def test_of_two_requests_the_one_with_the_longer_target_of_its_own_goes_later() -> None:
    core = core_with(ttft_ms=1000)
    core.send("patient", PROMPT[:40], max_tokens=1, ttft_ms=60_000.0)
    core.send("usual", PROMPT[1:41], max_tokens=1)
    assert core.waiting == ["usual", "patient"]


def test_a_cached_prefix_makes_a_long_prompt_short() -> None:
    core = core_with(ttft_ms=2000, enable_prefix_caching=True)
    core.send("first", PROMPT[:3000], max_tokens=1)
    core.run()
    core.send("new", tuple(reversed(PROMPT))[:1000], max_tokens=1)
    core.send("again", PROMPT[:3000], max_tokens=1)
    assert core.waiting == ["again", "new"]


@pytest.mark.parametrize(("where", "last"), [("front", 0), ("arrival", 0), ("back", -1)])
def test_a_preempted_request_waits_where_the_policy_says(where: str, last: int) -> None:
    core = core_with(ttft_ms=2000, scheduler=policy(chunk_halving_context=0, requeue=where))
    for name in ("a", "b", "c"):
        core.send(name, PROMPT[:40], max_tokens=1)
    scheduler = core._scheduler
    request = scheduler.find("a")
    assert request is not None
    scheduler.waiting.remove(request)
    scheduler.waiting.put_back(request, where)  # type: ignore[arg-type]
    assert core.waiting[last] == "a"


def test_a_request_that_is_still_prepared_loses_its_hope_like_others() -> None:
    core = core_with(ttft_ms=100)
    core.send("image", PROMPT[:40], max_tokens=1, prepared=False)
    core.send("running", PROMPT[:20], max_tokens=40, ignore_eos=True)
    while core.now < 0.3:
        core.keep(core.step())
    core.send("fresh", PROMPT[1:41], max_tokens=1)
    core.keep(core.prepared("image"))
    assert core.waiting == ["fresh", "image"]


@pytest.mark.parametrize("ends", ["aborted", "served"])
def test_a_request_that_has_ended_is_not_remembered_until_its_target_has_passed(ends: str) -> None:
    """Regression: a client could let the server remember prompts for a day, by a target as long as that."""
    core = core_with(ttft_ms=100)
    core.send("running", PROMPT[:20], max_tokens=50, ignore_eos=True)
    for number in range(20):
        core.send(f"r{number}", PROMPT[:40], max_tokens=1, ttft_ms=86_400_000.0)
        if ends == "aborted":
            core.keep(core.abort(f"r{number}"))
    while len(core.tokens("running")) < 40:
        core.keep(core.step())
    assert core.has_work
    assert len(core._scheduler._hopes) == 0


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_deadline_that_cannot_be_met_ends_a_request_before_it_costs_anything() -> None:
    core = core_with(tpot_ms=50)
    core.send("hopeless", PROMPT[:5000], max_tokens=1, timeout_s=0.9)
    (failed,) = core.events["hopeless"]
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.DEADLINE_EXCEEDED
    assert re.search(r"its prompt takes about \d\.\d s, and its deadline is 0\.9 s", failed.message)
    assert not core.has_work
    assert core.plans == []


def test_a_deadline_that_may_be_met_is_waited_for() -> None:
    for timeout_s, ends in ((60.0, Finished), (4.0, Failed)):
        core = core_with(tpot_ms=50)
        core.send("perhaps", PROMPT[:5000], max_tokens=1, timeout_s=timeout_s)
        assert core.events["perhaps"] == []
        core.run()
        assert type(core.events["perhaps"][-1]) is ends
        assert core.plans


def test_without_predictions_no_deadline_is_judged() -> None:
    core = RecordingCore(**LARGE)
    core.send("late", PROMPT[:5000], max_tokens=1, timeout_s=0.001)
    assert core.events["late"] == []


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        {"chunk_owner": "engine"},
        {"chunk_boundary": "request_local", "max_partial_prefills": 0},
        {"chunk_halving_context": 2048},
    ],
)
def test_a_chunk_that_cannot_follow_the_time_is_refused(scheduler: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"targets\.tpot_ms is 50"):
        EngineConfig(targets=Targets(tpot_ms=50), scheduler=SchedulerConfig(**scheduler))


def test_a_step_without_targets_costs_no_prediction() -> None:
    core = TimedCore(COSTS, scheduler=policy(), **LARGE)
    streams(core, 2)
    core.send("long", PROMPT[:3000], max_tokens=1)
    core.keep(core.step())
    assert parts(core.plans[-1]) == (2, 510)
