"""The reading of streamed answers: when each event came, and what it says, from a scripted transport."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from benchmarks.transport.figures import percentile
from loadtest.slo import Goal
from loadtest.sse import Lines, parse_lines, read_lines
from loadtest.tally import Tally
from loadtest.timeline import OK, Timeline

USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}


def text(content: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": content}]}


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields}]}


class Wire:
    """A transport whose clock is its script: line `i` is complete at `stamps[i]`."""

    def __init__(self, events: list[tuple[float, object]]) -> None:
        self._script: Iterator[tuple[float, bytes]] = iter(
            [(at, f"data: {e if isinstance(e, str) else json.dumps(e)}\n".encode()) for at, e in events]
        )
        self._ended = False
        self.now = 0.0
        self.pauses = 0

    def readline(self) -> bytes:
        self.now, line = next(self._script, (self.now, b""))
        return line

    def pause(self) -> None:
        self.pauses += 1

    def lines(self) -> Lines:
        found: Lines = []
        read_lines(self.readline, lambda: self.now, found, self.pause)
        return found


def test_each_event_has_the_time_at_which_its_line_was_complete() -> None:
    answer = parse_lines(
        Wire([(0.1, text("a")), (0.12, text("b")), (0.17, text("c")), (0.2, USAGE), (0.2, "[DONE]")]).lines()
    )
    assert (answer.arrivals, answer.text, answer.error) == ([0.1, 0.12, 0.17], "abc", None)
    assert (answer.prompt_tokens, answer.output_tokens) == (9, 3)


def test_events_without_text_are_no_arrivals_and_thoughts_and_calls_are() -> None:
    events: list[tuple[float, object]] = [
        (1.0, delta(role="assistant", content="")),
        (2.0, delta(reasoning_content="hm")),
        (3.0, delta(content="a")),
        (4.0, delta(tool_calls=[{"index": 0}])),
        (4.5, delta(content=[{"type": "thinking", "thinking": "hm"}])),
        (5.0, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        (6.0, USAGE),
        (6.0, "[DONE]"),
    ]
    answer = parse_lines(Wire(events).lines())
    assert (answer.arrivals, answer.finish_reason, answer.error) == ([2.0, 3.0, 4.0, 4.5], "stop", None)
    assert answer.text == "a"


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([text("a"), USAGE], "no end"),
        ([text("a"), "[DONE]"], "usage"),
        ([text(""), USAGE, "[DONE]"], "without text"),
        ([text("a"), {"error": {"message": "it broke"}}, USAGE, "[DONE]"], "it broke"),
        ([text("a"), "{", USAGE, "[DONE]"], "no JSON"),
        ([text("a"), 5, USAGE, "[DONE]"], "no event of an answer"),
        ([{"choices": ["a"]}, text("a"), USAGE, "[DONE]"], "no event of an answer"),
        ([text("a"), {"usage": {"prompt_tokens": None, "completion_tokens": None}}, "[DONE]"], "usage"),
        ([], "no end"),
    ],
)
def test_an_answer_that_is_not_whole_carries_an_error(events: list[object], reason: str) -> None:
    error = parse_lines(Wire([(1.0, event) for event in events]).lines()).error
    assert error is not None
    assert reason in error


def test_comments_and_empty_lines_are_no_events() -> None:
    wire = iter([b": keep-alive\n", b"\n", b'data: {"choices": [{"text": "a"}]}\n', b"\n", b""])
    lines: Lines = []
    read_lines(lambda: next(wire), lambda: 1.0, lines, lambda: None)
    assert [stamp for stamp, _ in lines] == [1.0]


def test_a_slow_reader_pauses_after_each_event() -> None:
    wire = Wire([(1.0, text("a")), (2.0, USAGE), (3.0, "[DONE]")])
    wire.lines()
    assert wire.pauses == 3


def test_what_came_before_the_connection_broke_is_kept() -> None:
    def readline() -> bytes:
        if lines:
            raise ConnectionResetError
        return b'data: {"choices": [{"text": "a"}]}\n'

    lines: Lines = []
    with pytest.raises(ConnectionResetError):
        read_lines(readline, lambda: 1.0, lines, lambda: None)
    assert parse_lines(lines).arrivals == [1.0]


def test_percentiles_of_scripted_streams_are_within_two_percent_of_the_truth() -> None:
    """This covers the way from the bytes to the figures, with no clock but the script's."""
    draw = random.Random(11)
    tally = Tally(Goal())
    tally.open_window("a", 1000.0)
    truth: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    for _ in range(500):
        ttft, gaps = draw.lognormvariate(-2, 0.7), [draw.lognormvariate(-4, 0.5) for _ in range(30)]
        stamps = [ttft + sum(gaps[:n]) for n in range(31)]
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 31}}
        end = stamps[-1] + 0.001
        events = [(at, text("a")) for at in stamps] + [(end, usage), (end, "[DONE]")]
        answer = parse_lines(Wire(events).lines())
        found = Timeline(0.0, 0.0, end, OK, tuple(answer.arrivals), 5, answer.output_tokens)
        tally.record("a", "chat", found, (0.0, 1000.0))
        truth["ttft"].append(1e3 * ttft)
        truth["itl"] += [1e3 * gap for gap in gaps]
        truth["tpot"].append(1e3 * sum(gaps) / 30)
        truth["e2e"].append(1e3 * end)
    figures = tally.figures("a")
    for name, values in truth.items():
        for share in (50, 90, 95, 99):
            expected = percentile(sorted(values), share / 100)
            assert figures[f"{name}_p{share}_ms"] == pytest.approx(expected, rel=0.02), f"{name} {share}"
