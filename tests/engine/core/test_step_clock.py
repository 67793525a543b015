"""Contracts of the clock of the step loop: when a step counts as hung,
and when it is only as long as steps are here."""

from __future__ import annotations

import pytest

from engine.core.step_clock import HALF_LIFE_S, StepClock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def steps(clock: Clock) -> StepClock:
    return StepClock(clock)


def make(steps: StepClock, clock: Clock, *took_s: float) -> None:
    """Run steps that take so long, one after another; then the loop waits for work."""
    steps.come_round()
    for seconds in took_s[:-1]:
        clock.now += seconds
        steps.come_round()
    clock.now += took_s[-1]
    steps.rest()


def test_a_loop_that_waits_for_work_is_not_hung(steps: StepClock, clock: Clock) -> None:
    make(steps, clock, 0.1)
    clock.now += 1e6
    assert steps.stood_s == 0
    assert not steps.stands(2, 4)


def test_a_step_counts_as_hung_once_it_has_taken_the_least_time_and_many_times_the_slowest(
    steps: StepClock, clock: Clock
) -> None:
    make(steps, clock, 0.5, 0.1)
    steps.come_round()
    clock.now += 2
    assert not steps.stands(2, 4), "exactly as long as it may take"
    clock.now += 0.1
    assert steps.stands(2, 4)
    assert not steps.stands(2, 5), "four times the slowest step, and not five"


def test_a_long_step_does_not_count_as_hung_where_steps_are_long(steps: StepClock, clock: Clock) -> None:
    make(steps, clock, 3.0, 0.01, 0.01)
    steps.come_round()
    clock.now += 11.9
    assert not steps.stands(2, 4)


def test_a_night_without_work_forgets_nothing(steps: StepClock, clock: Clock) -> None:
    make(steps, clock, 3.0)
    clock.now += 100_000
    make(steps, clock, 0.1)
    assert steps.slowest_s == pytest.approx(3.0, rel=0.001)


def test_what_was_slow_is_forgotten_by_and_by_while_there_is_work(steps: StepClock, clock: Clock) -> None:
    make(steps, clock, 4.0)
    make(steps, clock, *[HALF_LIFE_S / 1000] * 1000)
    assert steps.slowest_s == pytest.approx(2.0, rel=0.01)


def test_one_step_of_a_stopped_process_does_not_hide_the_next_one_that_never_returns(
    steps: StepClock, clock: Clock
) -> None:
    make(steps, clock, 0.1, 60.0, 0.1)
    steps.come_round()
    clock.now += 2.1
    assert steps.stands(2, 4)


def test_steps_that_really_have_become_longer_are_believed_after_a_few(steps: StepClock, clock: Clock) -> None:
    make(steps, clock, 0.5, 8.0, 8.0, 8.0, 8.0)
    assert steps.slowest_s == pytest.approx(8.0, rel=0.05)
