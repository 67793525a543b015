"""The sums of a load, on timelines whose times are known."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.transport.figures import percentile
from loadtest.slo import Goal
from loadtest.tally import Tally
from loadtest.timeline import CANCELLED, FAILED, OK, REJECTED, Timeline

WINDOW = (0.0, 100.0)


def answer(
    due: float, ttft_s: float, gaps_s: tuple[float, ...] = (), *, sent: float | None = None, queue_ms: float | None = 1
) -> Timeline:
    """Make an answer with one token per event."""
    arrivals = [due + ttft_s]
    for gap in gaps_s:
        arrivals.append(arrivals[-1] + gap)
    sent = due if sent is None else sent
    return Timeline(due, sent, arrivals[-1], OK, tuple(arrivals), 7, len(arrivals), 200, "length", queue_ms)


def tally(*answers: Timeline, goal: Goal | None = None, window: tuple[float, float] = WINDOW) -> Tally:
    found = Tally(goal or Goal())
    found.open_window("a", window[1] - window[0])
    for one in answers:
        found.record("a", "chat", one, window, asked_tokens=7)
    return found


def test_each_time_is_what_its_definition_says() -> None:
    found = tally(answer(1.0, 0.25, (0.02, 0.04), sent=1.05)).figures("a")
    assert found["lag_max_ms"] == pytest.approx(50)
    assert found["ttft_max_ms"] == pytest.approx(250)  # counted from when it was due, so the 50 ms are included
    assert found["tpot_max_ms"] == pytest.approx(30)
    assert found["itl_max_ms"] == pytest.approx(40)
    assert found["itl_mean_ms"] == pytest.approx(30)
    assert found["e2e_max_ms"] == pytest.approx(310)
    assert found["queue_max_ms"] == 1


def test_a_token_takes_as_long_where_a_server_sends_several_in_one_event() -> None:
    merged = Timeline(0.0, 0.0, 2.0, OK, (1.0, 2.0), 7, 11)
    assert tally(merged).figures("a")["tpot_max_ms"] == pytest.approx(100)


def test_percentiles_of_a_known_load_are_within_two_percent_of_the_truth() -> None:
    draw = random.Random(5)
    answers = [
        answer(i / 100, draw.lognormvariate(-2, 1), tuple(draw.expovariate(50) for _ in range(20))) for i in range(2000)
    ]
    found = tally(*answers).figures("a")
    truth = {
        "ttft": [one.ttft_ms or 0 for one in answers],
        "tpot": [one.tpot_ms or 0 for one in answers],
        "e2e": [one.e2e_ms or 0 for one in answers],
        "itl": [gap for one in answers for gap in one.gaps_ms()],
    }
    for name, values in truth.items():
        for share in (50, 90, 95, 99):
            expected = percentile(sorted(values), share / 100)
            assert found[f"{name}_p{share}_ms"] == pytest.approx(expected, rel=0.02), f"{name} {share}"


def test_goodput_is_of_the_window_and_attainment_of_all_that_was_offered() -> None:
    good, slow = answer(1.0, 0.1), answer(2.0, 5.0)
    refused = Timeline(3.0, 3.0, 3.0, REJECTED, status=429, retry_after=True, error="429")
    broken = Timeline(4.0, 4.0, 4.5, FAILED, error="reset")
    found = tally(good, slow, refused, broken, window=(0.0, 10.0)).figures("a")
    assert found["goodput_per_s"] == pytest.approx(0.1)
    assert found["good_share"] == pytest.approx(0.25)
    assert found["offered_per_s"] == pytest.approx(0.4)
    assert (found["rejected_share"], found["failed_share"], found["retry_after_share"]) == (0.25, 0.25, 1.0)


def test_what_was_due_before_or_after_the_window_is_not_counted_and_its_tokens_within_are() -> None:
    early, inside, late = answer(4.0, 1.5, (1.0,)), answer(6.0, 1.0), answer(10.0, 1.0)
    found = tally(early, inside, late, window=(5.0, 10.0)).figures("a")
    assert (found["offered"], found["ttft_max_ms"]) == (1, 1000)
    assert found["output_tokens_per_s"] == pytest.approx(3 / 5)  # two tokens of the first answer, one of the second


def test_a_refusal_has_no_times_of_an_answer() -> None:
    found = tally(Timeline(1.0, 1.0, 1.001, REJECTED, status=429, queue_ms=0.5)).figures("a")
    assert not [name for name in found if name.startswith(("ttft", "e2e", "queue"))]


def test_what_a_client_left_on_purpose_counts_apart() -> None:
    found = tally(Timeline(1.0, 1.0, 2.0, CANCELLED, (1.5,), 7, 1)).figures("a")
    assert (found["cancelled_share"], found["good"], found["failed"]) == (1.0, 0, 0)
    assert found["ttft_max_ms"] == 500
    assert "e2e_max_ms" not in found


def test_the_ratio_of_prompt_lengths_to_those_asked_for_is_reported() -> None:
    assert tally(answer(1.0, 0.1)).figures("a")["prompt_length_ratio"] == 1.0


def test_the_workers_tallies_add_up_to_that_of_one_worker() -> None:
    draw = random.Random(3)
    answers = [answer(i / 10, draw.random(), (draw.random(), draw.random())) for i in range(50)]
    merged, whole = tally(*answers[::2]), tally(*answers)
    merged.merge(Tally.from_json(json.loads(json.dumps(tally(*answers[1::2]).to_json()))))
    assert merged.figures("a") == pytest.approx(whole.figures("a"))
    assert merged.windows == whole.windows
    assert sorted(merged.seconds) == sorted(whole.seconds)
    for at, second in whole.seconds.items():
        assert merged.seconds[at].counts == pytest.approx(second.counts)


def test_kinds_are_told_apart_and_together() -> None:
    found = tally(answer(1.0, 0.1))
    found.record("a", "batch", answer(1.0, 0.3), WINDOW)
    assert found.kinds("a") == ["chat", "batch"]
    assert found.figures("a", "chat")["ttft_max_ms"] == pytest.approx(100)
    assert found.figures("a", "batch")["ttft_max_ms"] == pytest.approx(300)
    assert found.figures("a")["offered"] == 2


def test_seconds_have_what_was_due_and_what_arrived_in_them() -> None:
    found = tally(answer(1.5, 0.6, (1.0,)), goal=Goal(tpot_ms=None))
    assert found.seconds[1].counts == {"offered": 1, "good": 1}
    assert found.seconds[1].times["ttft"].most == pytest.approx(600)
    assert found.seconds[2].counts == {"tokens": 1}
    assert found.seconds[3].counts == {"tokens": 1}
    assert found.seconds[3].times["itl"].most == pytest.approx(1000)


def test_errors_and_reasons_are_counted() -> None:
    found = tally(answer(1.0, 0.1), Timeline(2.0, 2.0, 3.0, FAILED, error="reset")).whole()
    assert (found.errors, found.finish_reasons) == ({"reset": 1}, {"length": 1})
