"""What a terminal shows while a load runs."""

from __future__ import annotations

import io

from loadtest.arrivals import Profile
from loadtest.plan import Open, Plan, Point, Shape
from loadtest.progress import BAR, CUT_OFF, EVERY, WRAP, Progress
from loadtest.tally import Tally
from loadtest.timeline import FAILED, OK, Timeline

PLAN = Plan((Point("a", (Open("k", Shape(1, 1), Profile.constant(1.0, 20.0)),), 20.0),))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tally() -> Tally:
    found = Tally()
    found.record("a", "k", Timeline(0.0, 0.0, 0.2, OK, (0.1, 0.2), 5, 2), (0.0, 20.0))
    found.record("a", "k", Timeline(0.0, 0.0, 0.2, FAILED, error="reset"), (0.0, 20.0))
    return found


def test_a_line_says_how_far_the_load_is_and_how_it_goes() -> None:
    stream = Terminal()
    progress = Progress(PLAN, stream)
    progress.point = "a"
    progress.show(5.0, tally(), in_flight=3)
    line = stream.getvalue()
    assert (
        f"[{'#' * (BAR // 4)}{'.' * (BAR - BAR // 4)}] 5/20 s | a | 2 ended, 3 in flight, 1 failed, 0 refused" in line
    )
    assert "good 50 %" in line
    assert "TTFT 100/100 ms" in line


def test_on_a_terminal_a_line_is_written_over_the_last_one() -> None:
    stream = Terminal()
    progress = Progress(PLAN, stream)
    for second in range(3):
        progress.show(float(second), tally(), 0)
    progress.end()
    assert stream.getvalue().count("\r\x1b[K") == 3
    assert stream.getvalue().count("\n") == 1


def test_a_line_that_is_wider_than_the_terminal_is_cut_off_and_leaves_no_row_behind() -> None:
    stream = Terminal()
    Progress(PLAN, stream).show(5.0, tally(), in_flight=3)
    before, line = stream.getvalue().split(CUT_OFF)
    assert before == "\r\x1b[K"
    assert line.endswith(f"ms{WRAP}"), "what comes later is not cut off"


def test_in_a_log_there_is_a_line_now_and_then() -> None:
    stream = io.StringIO()
    progress = Progress(PLAN, stream)
    for second in range(2 * EVERY):
        progress.show(float(second), tally(), 0)
    progress.end()
    assert len(stream.getvalue().splitlines()) == 2
    assert "\r" not in stream.getvalue()


def test_a_load_that_is_late_is_never_more_than_whole() -> None:
    stream = io.StringIO()
    Progress(PLAN, stream).show(99.0, Tally(), 0)
    assert f"[{'#' * BAR}] 99/20 s" in stream.getvalue()
