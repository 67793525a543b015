"""The search for the highest rate within the limits, on servers whose capacity is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import find_rate
from loadtest.find_rate import LEAST, Bracket, Runs, Undecided, search, summary
from loadtest.slo import BROKEN, MISSED, PASSED


class Known:
    """A server that keeps its limits up to a known rate."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.tried: list[float] = []

    def __call__(self, rate: float) -> bool:
        self.tried.append(rate)
        return rate <= self.capacity


@given(st.floats(0.05, 400.0), st.floats(0.01, 500.0), st.floats(0.02, 0.5))
def test_the_rate_that_is_found_is_the_highest_to_the_precision(
    capacity: float, start: float, precision: float
) -> None:
    server = Known(capacity)
    found = search(server, start, precision, most=1000.0)
    assert found.kept <= capacity < found.missed
    assert found.missed / found.kept <= 1 + precision
    assert server.tried.count(found.kept) >= 2, "a load is random: once is not enough"
    assert len(server.tried) < 40


def test_no_rate_beyond_the_most_is_tried() -> None:
    server = Known(1e9)
    assert search(server, 3.0, 0.1, most=50.0) == Bracket(50.0, math.inf)
    assert max(server.tried) == 50.0


def test_a_server_that_keeps_its_limits_at_no_rate_has_none() -> None:
    found = search(Known(0.0), 1.0, 0.1, most=1000.0)
    assert found.kept == 0.0
    assert LEAST <= found.missed < 2 * LEAST


def test_a_rate_that_is_kept_by_luck_is_given_up() -> None:
    """8/s is kept once and then never again; 5/s always is."""
    lucky = iter([True])

    def keeps(rate: float) -> bool:
        return rate <= 5.0 or (rate == 8.0 and next(lucky, False))

    found = search(keeps, 8.0, 0.05, most=1000.0)
    assert 5.0 / 1.05 <= found.kept <= 5.0


@given(st.integers(0, 2**32))
def test_a_search_among_random_answers_ends_with_a_rate_that_was_kept(seed: int) -> None:
    draw = random.Random(seed)
    kept: set[float] = set()

    def keeps(rate: float) -> bool:
        answer = draw.random() < 1 / (1 + rate)
        if answer:
            kept.add(rate)
        return answer

    found = search(keeps, 1.0, 0.1, most=1000.0)
    assert found.kept == 0.0 or found.kept in kept


@given(st.integers(0, 2**32))
def test_a_rate_that_has_missed_its_limits_once_is_not_found_though_it_keeps_them_later(seed: int) -> None:
    """Around its capacity, a server keeps the limits by luck."""
    draw, kept, missed = random.Random(seed), set[float](), set[float]()

    def keeps(rate: float) -> bool:
        answer = rate <= 6.0 * math.exp(draw.gauss(0.0, 0.5))
        (kept if answer else missed).add(rate)
        return answer

    found = search(keeps, 1.0, 0.1, most=1000.0)
    assert found.missed == min(missed)
    assert found.kept == 0.0 or found.kept in kept - missed


def run(rate: float, code: int) -> dict[str, Any]:
    point = {"name": f"{rate:g}", "x": rate, "line": "", "figures": {"goodput_per_s": rate}, "kinds": {}}
    return {
        "exit_code": code,
        "missed": ["m"] * bool(code),
        "points": [point],
        "plan": {},
        "x_label": "",
        "course": rate,
    }


def test_the_summary_has_a_point_for_each_run_and_the_course_of_the_one_that_was_found() -> None:
    found = summary([run(1.0, 0), run(4.0, 3), run(2.0, 0), run(2.0, 0)], Bracket(2.0, 4.0))
    assert [point["x"] for point in found["points"]] == [1.0, 2.0, 2.0, 4.0]
    assert found["plan"] == {"rate_per_s": 2.0, "missed_at_per_s": 4.0, "runs": 4}
    assert (found["exit_code"], found["missed"], found["course"]) == (0, [], 2.0)


def test_a_search_that_found_nothing_is_a_miss() -> None:
    found = summary([run(0.001, 3)], Bracket(0.0, 0.001))
    assert found["exit_code"] == 3
    assert found["missed"] == ["the limits are not kept at 0.001 requests/s either"]


@pytest.mark.parametrize(("offered", "code"), [(0, MISSED), (3, MISSED), (3, PASSED)])
def test_a_run_in_which_nothing_of_a_kind_was_asked_is_no_miss(
    offered: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server without a fault had a highest rate of 0, if the first rate was low for --seconds. And a kind of requests
    that is seldom due counts as never answered."""

    def load(arguments: Sequence[str]) -> int:
        folder = Path(arguments[arguments.index("--out") + 1])
        folder.mkdir()
        kinds = {"often": {"offered": 9}, "seldom": {"offered": offered}}
        (folder / "report.json").write_text(json.dumps({"points": [{"kinds": kinds}]}))
        return code

    monkeypatch.setattr(find_rate, "run", load)
    runs = Runs([], tmp_path, None)
    if offered:
        assert runs.keeps(0.01) is (code == PASSED)
    else:
        with pytest.raises(Undecided, match=r"at 0\.01 requests/s had no .* kind seldom .* --seconds") as undecided:
            runs.keeps(0.01)
        assert undecided.value.code == BROKEN
