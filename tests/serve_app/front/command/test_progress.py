"""What a terminal shows while a plan is made."""

from __future__ import annotations

import io

import pytest

from serve_app.front.command.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_written_over_the_last_one_and_cut_off_where_the_terminal_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress()
    progress.say("searching")
    progress.count(1, 3)
    progress.count(2, 3)
    progress.end()
    rows = terminal.getvalue().split("\r\x1b[K")
    for row, done in zip(rows[1:3], (1, 2), strict=True):
        assert row.startswith("\x1b[?7l")
        assert row.endswith(f" s  searching: {done} of 3 simulations so far\x1b[?7h")
    assert (rows[0], rows[3:]) == ("", [""])


def test_elsewhere_each_phase_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    progress = Progress()
    progress.say("searching")
    progress.count(1, 3)
    progress.end()
    (line,) = log.getvalue().splitlines()
    assert line.endswith(" s  searching")
