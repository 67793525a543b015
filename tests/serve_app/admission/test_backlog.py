"""Owns the contract of measured backlogs: what a rate counts, and the bounds of an estimate.
Never sleeps: the clock is turned by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.admission.backlog import MAX_WAIT_S, MIN_WAIT_S, WINDOW_S, Backlog


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def worked_off(clock: Clock, backlog: Backlog, *, every_s: float, times: int, amount: int = 1) -> None:
    for _ in range(times):
        clock.now += every_s
        backlog.remove(amount, served=True)


def test_the_wait_is_the_amount_over_the_measured_rate() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(1000)
    worked_off(clock, backlog, every_s=0.5, times=20, amount=10)
    assert backlog.per_second == pytest.approx(20)
    assert backlog.wait_s(100) == pytest.approx(5)


def test_a_quiet_hour_is_no_slow_hour() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(10)
    worked_off(clock, backlog, every_s=1.0, times=10)
    clock.now += 3600
    backlog.add(100)
    assert backlog.wait_s(20) == pytest.approx(20), "the rate of the last busy time"


def test_what_left_by_itself_does_not_raise_the_rate() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(100)
    worked_off(clock, backlog, every_s=1.0, times=10)
    backlog.remove(50, served=False)
    assert backlog.per_second == pytest.approx(1)


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(10_000)
    worked_off(clock, backlog, every_s=0.1, times=100)
    worked_off(clock, backlog, every_s=2.0, times=WINDOW_S)
    assert backlog.per_second == pytest.approx(0.5, rel=0.1)


def test_the_longer_nothing_is_done_the_longer_the_wait_up_to_the_bound() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    backlog.add(5)
    assert backlog.wait_s(1) == MIN_WAIT_S
    clock.now += 7
    assert backlog.wait_s(1) == pytest.approx(7)
    worked_off(clock, backlog, every_s=1.0, times=1)
    clock.now += WINDOW_S - 1
    assert backlog.wait_s(1000) == MAX_WAIT_S


@given(st.lists(st.tuples(st.sampled_from(["add", "serve", "drop", "wait"]), st.integers(1, 500)), max_size=200))
def test_memory_and_estimates_are_bounded_whatever_happens(moves: list[tuple[str, int]]) -> None:
    clock = Clock()
    backlog = Backlog(clock)
    for move, number in moves:
        if move == "add":
            backlog.add(number)
        elif move == "wait":
            clock.now += number / 10
        else:
            backlog.remove(min(number, backlog.amount), served=move == "serve")
        assert MIN_WAIT_S <= backlog.wait_s(number) <= MAX_WAIT_S
        assert len(backlog._served) <= WINDOW_S
