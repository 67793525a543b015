"""Contracts of an engine's last steps: which are kept, which are reported again, and the pace of a window.
Never runs an engine: steps and the clock are written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.kv_tiers import Tier, TierLoad
from engine.observer import ComputedStep
from serve_app.metrics.activity import EngineActivity, TierActivity
from serve_app.metrics.recent_steps import _MOST_YIELDS, NUM_STEPS, WINDOW_S, RecentSteps
from serve_app.metrics.values import decode, encode
from tests.support.engines import resolved_config
from tests.support.fleet import load_snapshot


def step(step_id: int, decodes: int = 1, chunks: tuple[int, ...] = ()) -> ComputedStep:
    return ComputedStep(step_id, decodes, chunks, decodes + sum(chunks), 3, 0.0125)


def told(recent: RecentSteps, now: float, after: int | None = None) -> EngineActivity:
    return recent.snapshot(now).activity("e", resolved_config(), load_snapshot(), after)


def test_the_last_steps_are_kept_and_no_more() -> None:
    recent = RecentSteps(0.0)
    for number in range(NUM_STEPS + 10):
        recent.add(number / 1000, [step(number)], 1, {})
    assert [one.id for one in told(recent, 1.0).steps] == list(range(10, NUM_STEPS + 10))


def test_the_seats_are_those_of_all_ranks_as_the_running_requests_are() -> None:
    config = resolved_config(max_num_seqs=8, expert_parallel_size=4)
    found = RecentSteps(0.0).snapshot(1.0).activity("e", config, load_snapshot(num_running=8), None)
    assert (found.num_running, found.max_num_seqs) == (8, 32)


def test_a_known_step_is_not_reported_again_and_a_lost_one_in_between_does_not_matter() -> None:
    recent = RecentSteps(0.0)
    for number in (4, 5, 9, 10):  # 6 to 8 failed
        recent.add(1.0, [step(number)], 1, {})
    assert [one.id for one in told(recent, 1.0, after=5).steps] == [9, 10]
    assert [one.id for one in told(recent, 1.0, after=7).steps] == [9, 10]
    assert told(recent, 1.0, after=10).steps == ()
    assert [one.id for one in told(recent, 1.0, after=0).steps] == [4, 5, 9, 10]


def test_steps_of_ranks_that_count_each_for_itself_have_numbers_of_their_own() -> None:
    """What a rank with fewer steps did was never reported to a client that knew a later number of another rank's."""
    recent = RecentSteps(0.0)
    for rank_step in (step(0), step(0, 5), step(1), step(1, 5), step(7), step(2, 5)):
        recent.add(1.0, [rank_step], 1, {})
    assert [(one.id, one.decodes) for one in told(recent, 1.0).steps] == [
        (0, 1),
        (1, 5),
        (2, 1),
        (3, 5),
        (7, 1),
        (8, 5),
    ]
    assert [one.decodes for one in told(recent, 1.0, after=7).steps] == [5]


def test_a_steps_facts_are_reported_with_its_age() -> None:
    recent = RecentSteps(0.0)
    recent.add(1.0, [step(7, 2, (30, 4))], 2, {})
    (found,) = told(recent, 1.5).steps
    assert (found.decodes, found.chunks, found.waiting, found.ms, found.age_ms) == (2, (30, 4), 3, 12.5, 500)


def test_tiers_are_shown_with_what_came_from_them_and_travel_between_replicas() -> None:
    load = replace(
        load_snapshot(num_waiting=3),
        tiers=(TierLoad(Tier.HOST, capacity_bytes=900, used_bytes=300, hit_blocks=5), TierLoad(Tier.DISK)),
        num_loading=2,
    )
    found = RecentSteps(0.0).snapshot(1.0).activity("e", resolved_config(), load, None)
    assert (found.num_waiting, found.num_loading) == (3, 2)
    assert found.tiers == (TierActivity(Tier.HOST, 300, 900, 5 * 4), TierActivity(Tier.DISK, 0, 0, 0))
    assert decode(encode(found), EngineActivity) == found


def test_rates_are_of_the_window_and_what_is_older_is_forgotten() -> None:
    recent = RecentSteps(0.0)
    recent.add(1.0, [step(0, 0, (400,))], 1, {})
    recent.add(20.0, [step(1, 3, (50, 50))], 3, {0.5: 3})
    now = told(recent, 25.0)
    assert now.window_s == WINDOW_S
    assert (now.prompt_tokens_per_s, now.generated_tokens_per_s) == (100 / WINDOW_S, 3 / WINDOW_S)
    assert len(now.steps) == 2, "steps are kept by number and not by age"
    later = told(recent, 31.0)
    assert (later.prompt_tokens_per_s, later.generated_tokens_per_s, later.gap_p50_ms) == (0, 0, None)


def test_a_young_engines_rates_are_of_its_life_and_at_least_of_a_second() -> None:
    recent = RecentSteps(100.0)
    recent.add(100.1, [step(0)], 8, {})
    assert told(recent, 100.2).generated_tokens_per_s == 8
    assert told(recent, 104.0).generated_tokens_per_s == 2


def test_more_steps_than_are_kept_shorten_the_window_and_do_not_slow_the_rate() -> None:
    recent = RecentSteps(0.0)
    for number in range(3 * _MOST_YIELDS):
        recent.add(100 + number / 1000, [step(number)], 2, {0.001: 2})
    now = told(recent, 100 + 3 * _MOST_YIELDS / 1000)
    assert now.window_s == pytest.approx(_MOST_YIELDS / 1000)
    assert now.generated_tokens_per_s == pytest.approx(2000)


def test_percentiles_count_tokens_and_not_groups_of_them() -> None:
    recent = RecentSteps(0.0)
    recent.add(1.0, [step(0)], 98, {0.01: 98})
    recent.add(1.5, [step(1)], 2, {0.25: 1, 0.5: 1})
    now = told(recent, 2.0)
    assert (now.gap_p50_ms, now.gap_p99_ms) == (10, 250)


def test_one_gap_is_both_percentiles_and_a_first_token_is_none() -> None:
    recent = RecentSteps(0.0)
    recent.add(1.0, [step(0)], 5, {})
    assert (told(recent, 1.0).gap_p50_ms, told(recent, 1.0).gap_p99_ms) == (None, None)
    recent.add(1.1, [step(1)], 1, {0.1: 1})
    assert (told(recent, 1.1).gap_p50_ms, told(recent, 1.1).gap_p99_ms) == (100, 100)


def test_tokens_that_came_with_no_step_of_their_own_count() -> None:
    """An abort between steps can bring a stop token, and a call that yields nothing is not kept."""
    recent = RecentSteps(0.0)
    recent.add(1.0, [], 1, {})
    recent.add(1.0, [], 0, {})
    assert told(recent, 1.0).generated_tokens_per_s == 1
    assert len(recent.snapshot(1.0).yields) == 1
