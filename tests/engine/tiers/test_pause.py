"""What keeps failing is tried less and less often, and one line of the log says so."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from engine.tiers.pause import FIRST_S, LONGEST_S, QUIET_S, TOLERATED, Pause


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


def test_a_row_of_failures_makes_one_warning_and_a_later_row_another(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pause = Pause("stores to a directory", clock)
    for _ in range(5):
        pause.failed("no space")
    assert caplog.messages == [
        "stores to a directory fail and are tried again less and less often; the metrics count them: no space"
    ]
    for _ in range(5):
        pause.succeeded()
        pause.failed("no space for this one")
    assert len(caplog.messages) == 1, "it fails and works in turns"
    pause.succeeded()
    clock.now += QUIET_S
    pause.failed("no space for days")
    assert len(caplog.messages) == 2


def test_that_it_works_again_is_for_those_who_look_closely(caplog: pytest.LogCaptureFixture) -> None:
    pause = Pause("stores")
    pause.failed("no space")
    with caplog.at_level(logging.DEBUG):
        pause.succeeded()
        pause.succeeded()
    assert caplog.messages[1:] == ["stores work again after 1 failures"]
