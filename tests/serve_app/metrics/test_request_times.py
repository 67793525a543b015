"""Contracts of one request's times: which part is the engines', which is not, and when a deadline was missed.
Never waits: the clock is turned by hand."""

from __future__ import annotations

from contextlib import suppress

import pytest

from serve_app.metrics.request_times import RequestTimes

pytestmark = pytest.mark.anyio


class Turned(RequestTimes):
    """Times whose clock stands still until it is turned."""

    def __init__(self, at: float = 100.0) -> None:
        super().__init__()
        self.at = self.arrived = at
        self.now = lambda: self.at


def expecting(num_answers: int) -> Turned:
    times = Turned()
    for _ in range(num_answers):
        times.expects()
    return times


async def test_the_engines_time_is_from_the_first_answer_given_to_the_last_returned() -> None:
    times = expecting(2)
    times.at = 101
    times.given_to_engine()
    times.at = 103
    times.returned()
    assert not times.is_answered, "though nothing is with an engine"
    times.at = 104
    times.given_to_engine()
    times.at = 107
    times.returned()
    assert times.is_answered
    assert times.engine_s == 6


async def test_a_request_is_answered_once_it_has_an_answer_and_all_that_it_expected() -> None:
    assert not expecting(0).is_answered
    times = expecting(2)
    for is_answered in (False, True):
        times.given_to_engine()
        times.returned()
        assert times.is_answered is is_answered


async def test_waits_at_the_gate_add_up_also_one_that_fails() -> None:
    times = Turned()
    for error in (None, ZeroDivisionError):
        with suppress(ZeroDivisionError), times.at_gate():
            times.at += 2.5
            if error is not None:
                raise error
    assert times.gate_s == 5


async def test_the_first_token_is_the_first_one() -> None:
    times = Turned()
    for times.at in (101, 102):
        times.has_token()
    assert times.first_token == 101


@pytest.mark.parametrize(
    ("deadline_at", "returned_at", "missed"),
    [(None, None, False), (105, 104, False), (105, 105, True), (105, None, True), (200, None, False)],
)
async def test_a_deadline_is_missed_by_an_answer_that_is_not_whole_by_then(
    deadline_at: float | None, returned_at: float | None, missed: bool
) -> None:
    times = expecting(1)
    times.deadline_at = deadline_at
    times.given_to_engine()
    if returned_at is not None:
        times.at = returned_at
        times.returned()
    times.at = 110  # the request ends
    assert times.missed_deadline() is missed
