"""What keeps failing is tried less and less often, and one line of the log says so."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from engine.tiers.pause import FIRST_S, LONGEST_S, TOLERATED, Pause


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def tries_until(pause: Pause, clock: Clock, seconds: float) -> list[float]:
    """Fail whenever it is allowed, for so long; return when it was."""
    tried, end = [], clock.now + seconds
    while clock.now < end:
        if not pause.refusal():
            tried.append(clock.now)
            pause.failed("no space")
        clock.now += FIRST_S / 2
    return tried


def test_the_first_failures_are_tried_again_at_once_and_then_the_intervals_double_up_to_the_longest() -> None:
    clock = Clock()
    tried = tries_until(Pause("stores", clock), clock, 10 * LONGEST_S)
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[: TOLERATED - 1] == [FIRST_S / 2] * (TOLERATED - 1), "nothing but the clock's own step"
    rest = gaps[TOLERATED - 1 :]
    assert rest[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert max(rest) == rest[-1] == LONGEST_S


def test_while_one_tries_again_the_others_wait_for_how_it_ends() -> None:
    clock = Clock()
    pause = Pause("stores", clock)
    for _ in range(TOLERATED):
        pause.failed("no space")
    assert "no space" in pause.refusal()
    clock.now += FIRST_S
    assert pause.refusal() == ""
    assert pause.refusal() != ""
    pause.succeeded()
    assert pause.refusal() == ""


def test_a_row_of_failures_makes_one_warning_and_the_next_row_another(caplog: pytest.LogCaptureFixture) -> None:
    pause = Pause("stores to a directory")
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            pause.failed("no space")
        pause.succeeded()
        pause.succeeded()
        pause.failed("no space again")
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "WARNING"]
    assert "stores to a directory fail" in caplog.messages[0]
    assert "after 5 failures" in caplog.messages[1]
