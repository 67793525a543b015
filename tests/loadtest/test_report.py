"""What a report says about a load, and whether it passed."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtest.arrivals import Profile
from loadtest.page import page
from loadtest.plan import Open, Plan, Point, Shape
from loadtest.report import MOST_INTERVALS, Generator, RunEvents, document_of, intervals, verdict, write
from loadtest.slo import BROKEN, MISSED, PASSED, SATURATED, Goal, parse_limits
from loadtest.tally import Second, Tally
from loadtest.timeline import CANCELLED, FAILED, OK, REJECTED, Timeline

GENERATOR = Generator(workers=2, cpu_percent=12.0, max_cpu_percent=90.0, max_lag_ms=50.0)
SOURCE = Open("chat", Shape(4, 4), Profile.constant(1.0, 10.0))
PLAN = Plan((Point("a", (SOURCE,), 10.0, x=1.0), Point("b", (SOURCE,), 10.0, x=2.0)), x_label="requests a second")


def good(due: float, lag_s: float = 0.0) -> Timeline:
    return Timeline(due, due + lag_s, due + 0.4, OK, (due + 0.2, due + 0.3, due + 0.4), 9, 3, 200, "length", 3.0)


def refused(due: float, retry_after: bool) -> Timeline:
    return Timeline(due, due, due, REJECTED, status=429, retry_after=retry_after, error="429: busy <b>")


def tally(**points: list[Timeline]) -> Tally:
    found = Tally(Goal())
    for name, answers in points.items():
        found.open_window(name, 10.0)
        for answer in answers:
            found.record(name, "chat", answer, (0.0, 10.0), asked_tokens=9)
    return found


GOOD = tally(a=[good(1.0), good(2.0)], b=[good(1.0), good(2.0), good(3.0)])


def document(
    plan: Plan = PLAN, found: Tally = GOOD, generator: Generator = GENERATOR, run_events: RunEvents | None = None
) -> dict[str, Any]:
    return document_of(plan, found, generator, run_events or RunEvents(), {"scenario": "rates", "url": "http://x"})


# --- whether it passed ----------------------------------------------------------------------------------------------


def test_a_load_that_keeps_its_limits_has_passed() -> None:
    plan = dataclasses.replace(PLAN, limits=tuple(parse_limits("ttft_p99_ms<=201,failed<=0")))
    assert document(plan)["exit_code"] == PASSED


def test_each_point_has_to_keep_the_limits() -> None:
    plan = dataclasses.replace(PLAN, limits=tuple(parse_limits("offered<=2")))
    found = document(plan)
    assert (found["exit_code"], found["missed"]) == (MISSED, ["b: offered <= 2: 3"])


def test_a_generator_that_sent_late_fails_the_run_though_all_limits_are_kept() -> None:
    found = document(found=tally(a=[good(1.0, lag_s=0.06)], b=[good(1.0)]))
    assert found["exit_code"] == SATURATED
    assert found["saturated"] == ["a: the generator sent late: p99 60.0 ms, beyond 50 ms"]


def test_a_worker_without_cpu_to_spare_fails_the_run() -> None:
    found = document(generator=dataclasses.replace(GENERATOR, cpu_percent=97.0))
    assert (found["exit_code"], found["saturated"]) == (
        SATURATED,
        ["a worker took 97 % of a core, beyond 90 %: use more workers"],
    )


def test_a_run_that_is_not_whole_fails_whatever_its_figures() -> None:
    assert document(run_events=RunEvents(broken=["worker 1 was lost"]))["exit_code"] == BROKEN


def test_a_kind_that_is_judged_alone_keeps_the_limits_alone() -> None:
    source = dataclasses.replace(SOURCE, kind="slow")
    plan = Plan((Point("a", (SOURCE, source), 10.0),), tuple(parse_limits("ttft_p99_ms<=201")), judged="chat")
    found = tally(a=[good(1.0)])
    found.record("a", "slow", dataclasses.replace(good(1.0), arrivals=(9.0,)), (0.0, 10.0))
    assert document(plan, found)["exit_code"] == PASSED
    assert document(dataclasses.replace(plan, judged="slow"), found)["exit_code"] == MISSED


def test_a_kind_of_which_nothing_was_answered_fails_the_load() -> None:
    """Long prompts that are all refused disturb nobody, so that the others were fast would prove nothing."""
    source = dataclasses.replace(SOURCE, kind="long")
    plan = Plan((Point("a", (SOURCE, source), 10.0),), judged="chat")
    found = tally(a=[good(1.0)])
    undue = document(plan, found)
    assert undue["missed"] == ["a: no request of kind long was answered"]
    assert [(kind, figures["offered"]) for kind, figures in undue["points"][0]["kinds"].items()] == [
        ("chat", 1),
        ("long", 0),
    ]
    found.record("a", "long", Timeline(1.0, 1.0, 2.0, FAILED, error="400"), (0.0, 10.0))
    assert document(plan, found)["missed"] == ["a: no request of kind long was answered"]
    found.record("a", "long", Timeline(1.0, 1.0, 2.0, CANCELLED), (0.0, 10.0))
    assert document(plan, found)["missed"] == []


def test_goodput_that_collapses_under_overload_is_a_miss() -> None:
    plan = dataclasses.replace(PLAN, no_collapse=0.7)
    assert document(plan)["missed"] == []
    worse = tally(a=[good(1.0), good(2.0)], b=[good(1.0), *(refused(2.0, True) for _ in range(9))])
    assert document(plan, worse)["missed"] == ["b: goodput 0.10/s, less than 0.7 of 0.20/s at a"]
    nothing = tally(a=[refused(1.0, True)], b=[good(1.0)])
    assert "a: no goodput, of which something could be left" in document(plan, nothing)["missed"]


def test_a_refusal_that_does_not_say_when_to_come_again_is_a_miss_where_the_load_asks_for_it() -> None:
    found = tally(a=[good(1.0), refused(2.0, True), refused(3.0, False)], b=[good(1.0), refused(2.0, True)])
    assert document(found=found)["missed"] == []
    missed = document(dataclasses.replace(PLAN, retry_after=True), found)["missed"]
    assert missed == ["a: 50 % of the refusals say when to come again"]


def test_what_the_server_holds_on_to_is_a_miss() -> None:
    found = document(run_events=RunEvents(unsettled=["the server still holds 2 requests"]))
    assert (found["exit_code"], found["missed"]) == (MISSED, ["the server still holds 2 requests"])


def test_a_load_that_was_ended_misses_only_what_it_had_begun() -> None:
    """Its later points had no figures, which broke each limit, and kinds whose first request was not due counted as
    unanswered."""
    limits = tuple(parse_limits("ttft_p99_ms<=100,failed<=0"))
    plan = dataclasses.replace(PLAN, limits=limits, no_collapse=0.9)
    begun = tally(a=[good(1.0)])
    found = document(plan, begun, run_events=RunEvents(ended="after 5 s"))
    assert (found["exit_code"], found["ended"], found["broken"]) == (BROKEN, "after 5 s", [])
    assert found["missed"] == ["a: ttft_p99_ms <= 100: 200"]
    assert len(document(plan, begun)["missed"]) > 3


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        (RunEvents(ended="after 5 s"), ["ended early: after 5 s", "incomplete, with code 5"]),
        (
            RunEvents(ended="after 5 s", unsettled=["it holds 2"]),
            ["ended early: after 5 s", "missed: it holds 2", "failed, with code 5"],
        ),
    ],
    ids=["alone", "beside a miss"],
)
def test_a_load_that_was_ended_has_failed_only_by_what_else_is_wrong(events: RunEvents, lines: list[str]) -> None:
    found = document(run_events=events)
    assert verdict(found)[-len(lines) :] == lines
    assert "ended early: after 5 s" in page(found)


# --- the document ---------------------------------------------------------------------------------------------------


def test_the_document_is_json_and_has_each_points_figures(tmp_path: Path) -> None:
    write(document(), tmp_path / "new" / "folder")
    found = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())
    assert found["schema"] == 1
    assert [(point["name"], point["x"], point["figures"]["good"]) for point in found["points"]] == [
        ("a", 1.0, 2),
        ("b", 2.0, 3),
    ]
    assert found["distributions"]["ttft"][5] == [0.5, pytest.approx(200, rel=0.002)]
    assert found["finish_reasons"] == {"length": 5}


def test_the_course_of_a_run_has_rates_and_percentiles_of_each_interval() -> None:
    first, *_ = document()["intervals"]
    assert (first["at_s"], first["seconds"], first["offered_per_s"]) == (1, 1, 2.0)
    assert first["ttft_p50_ms"] == pytest.approx(200)
    assert first["tokens_per_s"] == pytest.approx(6.0)


def test_a_long_runs_intervals_are_longer_and_add_up() -> None:
    seconds = {at: Second({"offered": 2}) for at in range(10_000)}
    found = list(intervals(seconds))
    assert len(found) <= MOST_INTERVALS
    assert sum(one["offered_per_s"] * one["seconds"] for one in found) == 20_000
    assert list(intervals({})) == []


def test_the_verdict_names_what_is_wrong() -> None:
    lines = verdict(document(run_events=RunEvents(broken=["worker 1 was lost"])))
    assert lines[-2:] == ["broken: worker 1 was lost", "failed, with code 5"]
    assert any("TTFT p50 200.0 p99 200.0 ms" in line for line in lines)
    assert verdict(document())[-1] == "passed"


# --- the page -------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_that_needs_nothing_from_elsewhere() -> None:
    parser = Tags()
    parser.feed(page(document()))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.found}
    assert not [attrs for _, attrs in parser.found if {"src", "href"} & set(attrs)]
    assert "@import" not in page(document())


def test_the_page_has_the_verdict_the_figures_and_the_charts() -> None:
    text = page(document())
    for words in (
        "passed (code 0)",
        "<p>An answer is good with TTFT ≤ 1000 ms, TPOT ≤ 100 ms. Limits: none.</p>",
        "Latency over time: time to first token",
        "Latency over time: between tokens",
        "Percentiles, ms",
        "Goodput against load",
    ):
        assert words in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_load_of_one_point_has_no_chart_against_load() -> None:
    assert "against load" not in page(document(dataclasses.replace(PLAN, points=PLAN.points[:1])))


def test_what_a_server_wrote_is_escaped() -> None:
    found = tally(a=[good(1.0), refused(2.0, True)], b=[good(1.0)])
    text = page(document(found=found))
    assert "429: busy &lt;b&gt;" in text
    assert "busy <b>" not in text


def test_what_was_done_to_the_deployment_is_marked_in_the_charts() -> None:
    text = page(document(run_events=RunEvents(happened=[(1.5, "kubectl delete pod head")])))
    assert text.count('class="mark"') == 4  # in each chart over time


def test_a_run_of_which_nothing_was_answered_has_a_page_too() -> None:
    found = tally(a=[Timeline(1.0, 1.0, 1.1, FAILED, error="reset")], b=[])
    assert "reset" in page(document(found=found))
