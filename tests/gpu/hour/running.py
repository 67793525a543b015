"""Owns one part of the hour while it runs: its processes, killed at the limit with everything that they started.
Never knows what a part measures: it reads the JSON that the part keeps, as it comes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LOOK_S = 0.2
"""Seconds between two looks at a part."""
TAIL = 4000
"""Characters of a failed part's output that are kept with its result."""


@dataclass(frozen=True)
class Part:
    """A command to run. `{result}`, `{copy}` and `{copies}` in its arguments and variables are filled in."""

    name: str
    limit_s: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    copies: int = 1
    """How many processes at once, each with a result of its own."""


@dataclass(frozen=True)
class Outcome:
    name: str
    word: str
    """passed, failed, limit, signal, not kept or not reached."""
    why: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    results: tuple[Any, ...] = ()
    """What each copy kept last; None: nothing."""
    tail: str = ""

    @property
    def passed(self) -> bool:
        return self.word == "passed"


class _Copy:
    """One process, in a process group of its own."""

    def __init__(self, part: Part, number: int, scratch: Path) -> None:
        self._result, self._log = scratch / f"{part.name}.{number}.json", scratch / f"{part.name}.{number}.log"
        self._seen = 0.0
        self.kept: Any = None
        places = {"{result}": str(self._result), "{copy}": str(number), "{copies}": str(part.copies)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [_filled(text, places) for text in part.command],
                cwd=ROOT,
                env=os.environ | {name: _filled(text, places) for name, text in part.environment.items()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # its own, but in this session: whoever ends the session ends the part, too
            )

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def look(self) -> bool:
        """Read what it kept; return whether that is new."""
        try:
            changed = self._result.stat().st_mtime_ns
            if changed == self._seen:
                return False
            self.kept, self._seen = json.loads(self._result.read_text(encoding="utf-8")), changed
        except FileNotFoundError:
            return False
        except ValueError as error:
            self.kept = {"unreadable": str(error)}
        return True

    def end(self) -> None:
        """Kill it with everything that it started and that is still in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def _filled(text: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def run_part(part: Part, limit_s: float, scratch: Path, keep: Callable[[Outcome], object]) -> Outcome:
    """Run a part to its end or its limit. keep: called as results come, with an outcome whose word is `running`.

    Raises:
        OSError: the part could not be started.
    """
    begun = monotonic()
    copies: list[_Copy] = []

    def outcome(word: str, why: str = "", tail: str = "") -> Outcome:
        kept = tuple(copy.kept for copy in copies)
        return Outcome(part.name, word, why, round(monotonic() - begun, 1), round(limit_s, 1), kept, tail)

    try:
        copies += [_Copy(part, number, scratch) for number in range(part.copies)]
        while not (late := monotonic() - begun >= limit_s):
            if sum(copy.look() for copy in copies):
                keep(outcome("running"))
            if all(copy.status is not None for copy in copies):
                break
            sleep(LOOK_S)
        statuses = [copy.status for copy in copies]
    finally:
        for copy in copies:
            copy.end()
    for copy in copies:
        copy.look()
    word, why = ("limit", f"killed after {limit_s:.0f} s") if late else _word(statuses)
    tail = "" if word == "passed" else _tail(copies, statuses)
    return outcome(word, why, tail)


def _word(statuses: Sequence[int | None]) -> tuple[str, str]:
    bad = [status for status in statuses if status]
    if not bad:
        return "passed", ""
    if bad[0] < 0:
        return "signal", f"ended by {signal.Signals(-bad[0]).name}"
    return "failed", f"status {bad[0]}"


def _tail(copies: Sequence[_Copy], statuses: Sequence[int | None]) -> str:
    """Return the end of the output of the first copy that did not succeed."""
    for copy, status in zip(copies, statuses, strict=True):
        if status != 0:
            return copy.output()[-TAIL:]
    return ""
