"""What a service promises: when an answer is good, which limits a load misses, and with what code a run ends."""

from __future__ import annotations

import dataclasses

import pytest

from loadtest.slo import BROKEN, MISSED, PASSED, SATURATED, Goal, Limit, exit_code, misses, parse_goal, parse_limits
from loadtest.timeline import CANCELLED, FAILED, OK, REJECTED, Timeline

ANSWER = Timeline(1.0, 1.0, 1.5, OK, (1.1, 1.2, 1.3), 10, 3)  # TTFT 100 ms, TPOT 100 ms, E2E 500 ms


@pytest.mark.parametrize(
    ("goal", "is_met"),
    [
        (Goal(), True),
        (Goal(ttft_ms=99.0), False),
        (Goal(tpot_ms=99.0), False),
        (Goal(e2e_ms=499.0), False),
        (Goal(101.0, 101.0, 501.0), True),
        (Goal(gap_p95_ms=99.0), False),
        (Goal(gap_p95_ms=101.0), True),
        (Goal(None, None, None), True),
    ],
)
def test_an_answer_is_good_if_it_keeps_every_time(goal: Goal, is_met: bool) -> None:
    assert goal.is_met(ANSWER) is is_met


@pytest.mark.parametrize("outcome", [REJECTED, FAILED, CANCELLED])
def test_an_answer_that_is_not_whole_is_never_good(outcome: str) -> None:
    assert not Goal(None, None, None).is_met(dataclasses.replace(ANSWER, outcome=outcome))


def test_a_late_request_is_not_good_however_fast_the_server_answered_it() -> None:
    """Times count from when a request was due: otherwise a client that
    sends late would hide what the server made it wait."""
    assert not Goal(ttft_ms=500.0).is_met(dataclasses.replace(ANSWER, due=0.5))


def test_a_single_token_has_no_pace_to_miss() -> None:
    assert Goal(tpot_ms=0.1).is_met(dataclasses.replace(ANSWER, arrivals=(1.1,), output_tokens=1))


def test_one_gap_in_twenty_may_be_longer() -> None:
    """A stream that stops once for a long prompt keeps its pace, while TPOT would spread the pause over all tokens."""
    arrivals = [1.0 + 0.01 * i for i in range(20)]
    answer = dataclasses.replace(ANSWER, arrivals=(*arrivals, arrivals[-1] + 5.0), output_tokens=21)
    assert Goal(None, None, None, gap_p95_ms=11.0).is_met(answer)
    assert not Goal(None, None, None, gap_p95_ms=11.0).is_met(
        dataclasses.replace(answer, arrivals=(*answer.arrivals, answer.arrivals[-1] + 5.0))
    )
    assert Goal(gap_p95_ms=0.1).is_met(dataclasses.replace(ANSWER, arrivals=(1.05,), output_tokens=1))


def test_a_goal_is_read_and_what_is_left_out_has_no_limit() -> None:
    assert parse_goal("ttft:1000, tpot:50") == Goal(1000.0, 50.0, None)
    assert parse_goal("gap_p95:50") == Goal(None, None, None, 50.0)
    assert parse_goal("e2e:2e4") == Goal(None, None, 20000.0)
    assert parse_goal("") == Goal(None, None, None)


@pytest.mark.parametrize("text", ["itl:5", "ttft:1,ttft:2", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "ttft=5"])
def test_a_goal_that_says_nothing_clear_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_goal(text)


def test_limits_are_read() -> None:
    assert parse_limits("ttft_p99_ms<=1000, good_share>=0.99") == [
        Limit("ttft_p99_ms", "<=", 1000.0),
        Limit("good_share", ">=", 0.99),
    ]


@pytest.mark.parametrize("text", ["ttft_p99_ms<1", "ttft_p99_ms<=", "<=1", "a<=b", "a<=1 b<=2"])
def test_a_limit_that_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a limit is"):
        parse_limits(text)


def test_each_limit_that_a_point_does_not_keep_is_a_miss() -> None:
    limits = parse_limits("ttft_p99_ms<=100,good_share>=0.9")
    points = {"slow": {"ttft_p99_ms": 101.0, "good_share": 0.9}, "bad": {"ttft_p99_ms": 100.0, "good_share": 0.5}}
    assert misses(limits, points) == ["slow: ttft_p99_ms <= 100: 101", "bad: good_share >= 0.9: 0.5"]


def test_a_figure_that_is_not_there_breaks_its_limit() -> None:
    """A load of which nothing was answered has no times, and would otherwise pass every limit on them."""
    assert misses(parse_limits("ttft_p99_ms<=100"), {"a": {"offered": 9.0}}) == [
        "a: ttft_p99_ms <= 100: there is no such figure"
    ]


def test_a_saturated_generator_outweighs_a_missed_limit_and_a_broken_run_both() -> None:
    assert exit_code([], [], []) == PASSED
    assert exit_code([], [], ["m"]) == MISSED
    assert exit_code([], ["s"], ["m"]) == SATURATED
    assert exit_code(["b"], ["s"], ["m"]) == BROKEN
