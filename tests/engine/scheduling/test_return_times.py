"""Owns the contract of return times: what holding a block on is worth after what was observed.
Never sees a block."""

from __future__ import annotations

from engine.scheduling.return_times import NUM_INTERVALS, ReturnTimes, interval_of


def test_intervals_grow_by_doubling_and_the_last_has_no_end() -> None:
    assert [interval_of(seconds) for seconds in (0, 0.25, 0.3, 1, 1e12)] == [0, 0, 1, 5, NUM_INTERVALS - 1]


def test_a_kind_that_returns_sooner_or_oftener_is_worth_more() -> None:
    sooner, later = ReturnTimes([(5, 100)], 100), ReturnTimes([(50, 100)], 100)
    oftener = ReturnTimes([(50, 190)], 10)
    assert sooner.rate(0) > oftener.rate(0) > later.rate(0) > 0


def test_a_pause_that_is_about_to_end_is_worth_holding_on_and_one_that_is_over_is_not() -> None:
    times = ReturnTimes([(30, 100)], 10)
    assert times.rate(20) > times.rate(1) > times.rate(300) == 0


def test_a_few_that_return_at_once_do_not_hide_the_many_that_return_later() -> None:
    times = ReturnTimes([(1, 10), (30, 1000)], 0)
    assert times.rate(0) > 0.02, "a few in the first second are 0.01 a second"


def test_old_observations_count_less_than_new_ones() -> None:
    times = ReturnTimes([(5, 100)], 0)
    for _ in range(10):
        times.forget_half()
    times.gone(10_000)
    fresh = ReturnTimes([(5, 100)], 1)
    assert times.rate(0) < fresh.rate(0)
