"""Contracts of the memory that admission keeps free by default:
what running answers are expected to take, judged by how long answers were."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.core.core import EngineCore
from engine.protocol import FinishReason, SamplingParams, Submission
from engine.scheduling.answer_lengths import ONE
from engine.scheduling.forecast import MOST_CAUTION, Forecast, horizons_up_to
from engine.scheduling.request import Request, create_request
from tests.support.engines import RecordingCore, resolved_config


def request_of(name: str, prompt: int, max_tokens: int | None = None, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=options.pop("ignore_eos", False))
    submission = Submission(name, tuple(1 + i % 30 for i in range(prompt)), params, **options)
    return create_request(submission, CONFIG, 0)


OPTIMISTIC = SchedulerConfig(reserve_clip=1, reserve_margin=0.0)
"""A forecast that looks one token ahead, and so lets memory run out."""
CONFIG = resolved_config(max_model_len=8192, num_kv_blocks=4096, block_size=16)


def forecast_of(core: EngineCore) -> Forecast:
    found = core._scheduler._forecast
    assert found is not None
    return found


def answer(forecast: Forecast, request: Request, length: int, *, by_itself: bool = True) -> None:
    """Report the whole life of an answer."""
    forecast.admit(request, 0)
    request.was_scheduled = True
    for _ in range(length):
        request.token_ids.append(1)
        forecast.follow(request)
    forecast.end(request, by_itself=by_itself)
    forecast.leave(request)


def learned(length: int, count: int = 200) -> Forecast:
    forecast = Forecast(CONFIG)
    for number in range(count):
        answer(forecast, request_of(str(number), 100), length)
    return forecast


def test_requests_that_do_not_say_how_long_their_answers_get_run_side_by_side() -> None:
    """Regression: with `ratio`, each had to find memory free for its longest answer,
    so with `max_tokens` unset one ran at a time."""

    def running(mode: str) -> int:
        core = RecordingCore(scheduler=SchedulerConfig(reserve_mode=mode), enable_prefix_caching=False)  # type: ignore[arg-type]
        for i in range(8):
            core.send(f"r{i}", [i + 1] * 4)
        core.keep(core.step())
        return core.load().num_running

    assert running("ratio") == 1
    assert running(SchedulerConfig().reserve_mode) >= 6


@pytest.mark.parametrize(("clip", "expected"), [(1, (1,)), (16, (16,)), (17, (16, 17)), (100, (16, 32, 64, 100))])
def test_horizons_reach_up_to_the_clip(clip: int, expected: tuple[int, ...]) -> None:
    assert horizons_up_to(clip) == expected


def test_an_answer_that_cannot_end_before_its_limit_counts_with_all_of_it() -> None:
    """With `ignore_eos` its length is known: the growth reaches 100 tokens at the horizon that follows,
    and then all is free."""
    forecast = Forecast(CONFIG)
    growth, variance = forecast.candidate(request_of("a", 64, 100, ignore_eos=True), 0)
    assert forecast.horizons[:4] == (16, 32, 64, 128)
    assert [grown / ONE for grown in growth[:5]] == pytest.approx([16, 32, 64, 92, -72]), (
        "as of the middle of 16 tokens"
    )
    assert set(variance) == {0}


def test_what_is_expected_of_an_answer_is_what_answers_took() -> None:
    forecast = learned(300)
    growth, _ = forecast.candidate(request_of("a", 64), 0)
    by_horizon = dict(zip(forecast.horizons, growth, strict=True))
    assert by_horizon[128] / ONE == pytest.approx(128, rel=0.1), "hardly any ends before"
    assert by_horizon[1024] / ONE == pytest.approx(-72, abs=25), "nearly all have ended, and their prompts are free"


def test_an_answer_that_is_nearly_as_long_as_answers_get_is_expected_to_free_its_memory() -> None:
    forecast = learned(300)
    old, young = request_of("old", 64), request_of("young", 64)
    old.token_ids += [1] * 290
    near = forecast.horizons.index(32)
    assert forecast.candidate(old, 0)[0][near] < 0 < forecast.candidate(young, 0)[0][near]


def test_shared_blocks_stay_with_who_else_holds_them() -> None:
    forecast = learned(300)
    alone, sharing = (forecast.candidate(request_of("a", 160), shared)[0] for shared in (0, 9))
    assert [more - less for more, less in zip(sharing, alone, strict=True)][-1] / ONE == pytest.approx(9 * 16, rel=0.1)


def test_what_is_kept_free_is_the_worst_horizon_and_a_margin() -> None:
    forecast = Forecast(CONFIG)
    growth, variance = [ONE * 32, ONE * 160, -ONE * 500], [0, 64 * 64, 0]
    assert forecast.peak(growth, variance) == math.ceil((160 + 32) / 16)
    assert forecast.peak([-ONE * 500], [0]) == 0


def test_a_share_is_taken_back_as_it_was_added() -> None:
    forecast = learned(50)
    assert set(forecast._growth) == set(forecast._variance) == {0}
    assert not forecast._entries


def test_whoever_is_preempted_in_a_plan_counts_no_more() -> None:
    forecast = Forecast(CONFIG)
    first, second = request_of("a", 64), request_of("b", 32)
    forecast.admit(first, 0)
    alone = forecast.of_others([])
    forecast.admit(second, 0)
    assert forecast.of_others([second]) == alone != forecast.of_others([])


def test_preemptions_raise_the_margin_and_good_steps_lower_it_again() -> None:
    forecast = Forecast(CONFIG)
    assert forecast.margin == 0.5
    forecast.after_step(preempted=3)
    assert forecast.margin == 0.7
    for _ in range(150):
        forecast.after_step(preempted=0)
    assert forecast.margin == pytest.approx(0.6)
    for _ in range(100):
        forecast.after_step(preempted=1)
    assert forecast.margin == 0.5 + MOST_CAUTION
    forecast.reset()
    assert forecast.margin == 0.5


def test_a_core_tells_its_margin_and_starts_over_when_it_is_idle() -> None:
    core = RecordingCore(num_kv_blocks=12, scheduler=OPTIMISTIC, enable_prefix_caching=False)
    for i in range(4):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=24, min_tokens=20)
    seen = []
    while core.has_work:
        core.keep(core.step())
        seen.append(core.load().reserve_margin)
    assert core.load().num_preemptions
    assert max(seen) >= 0.2
    assert seen[-1] == 0.0
    assert core.load().num_reserved_blocks == 0
    assert RecordingCore(scheduler=SchedulerConfig(reserve_mode="prompt")).load().reserve_margin == 0.0


def counts(core: RecordingCore) -> tuple[float, float]:
    """Count the answers that were begun, and those that ended by themselves."""
    table = forecast_of(core)._lengths.population
    return table._reached[0], sum(table._ended)


def test_an_answer_is_counted_once_however_often_it_loses_its_memory() -> None:
    """The same answers teach the same, with memory for all of them or with too little."""

    def learned_in(num_kv_blocks: int) -> tuple[list[float], list[float], int]:
        core = RecordingCore(num_kv_blocks=num_kv_blocks, scheduler=OPTIMISTIC, enable_prefix_caching=False)
        for i in range(4):
            core.send(f"r{i}", [i + 1] * 8, max_tokens=24, min_tokens=20, seed=i)
        core.run()
        table = forecast_of(core)._lengths.population
        return table._reached, table._ended, core.load().num_preemptions

    *tight, preemptions = learned_in(12)
    *roomy, none = learned_in(64)
    assert preemptions > none == 0
    assert tight == roomy


def test_answers_that_cannot_end_by_themselves_teach_nothing() -> None:
    core = RecordingCore()
    core.send("a", [1] * 8, max_tokens=40, ignore_eos=True)
    core.send("b", [1] * 8, max_tokens=0)
    core.run()
    assert counts(core) == (0, 0)


@pytest.mark.parametrize(
    ("reason", "expected"), [(FinishReason.ABORT, (0.5, 0)), (FinishReason.STOP, (1, 1))], ids=["left", "found its end"]
)
def test_an_answer_that_its_caller_ends_counts_as_cut_off_unless_it_found_its_end(
    reason: FinishReason, expected: tuple[float, float]
) -> None:
    """A stop string is found by whoever reads the text; a client that left says nothing about lengths."""
    core = RecordingCore()
    core.send("a", [1] * 8, max_tokens=100)
    core.keep(core.step())
    core.keep(core.abort("a", reason))
    assert counts(core) == expected


def test_an_answer_that_another_engine_began_is_as_long_as_both_made_it() -> None:
    forecast = learned(300)
    moved = request_of("moved", 64 + 290, num_answer_tokens=290)
    same = request_of("same", 64)
    same.token_ids += [1] * 290
    assert forecast.candidate(moved, 0)[0] == forecast.candidate(same, 0)[0]


def test_a_plan_that_is_dropped_changes_nothing_of_what_is_expected() -> None:
    core = RecordingCore(num_kv_blocks=24, enable_prefix_caching=False)
    for i in range(8):
        core.send(f"r{i}", [i + 1] * 8, max_tokens=60, tenant="ab"[i % 2])
    for _ in range(12):
        core.keep(core.step())
        forecast = forecast_of(core)
        before = deepcopy((forecast._growth, forecast._variance, forecast._lengths.population.__dict__))
        first, second = (core._scheduler.plan(0.0).rows for _ in range(2))
        assert first == second
        after = (forecast._growth, forecast._variance, forecast._lengths.population.__dict__)
        before[2].pop("_rows"), after[2].copy().pop("_rows")
        assert {**after[2], "_rows": 0} == {**before[2], "_rows": 0}
        assert after[:2] == before[:2]
