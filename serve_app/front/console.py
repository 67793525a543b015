"""Separates the output of `serve run`: this command's lines go to the terminal, and everything that Ray prints to a
file.
Never decides what is worth a line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.host.own_directory import own_directory
from serve_app.front.output import OutputLost

VARIABLE = "CHUNKSERVE_VERBOSE"
"""`1` has the same effect as --verbose."""


class Console:
    """Writes lines for the user, to the process's own standard output and error, also after `quiet`. told: puts a text
    in the user's words, if they named no config file.

    `say` raises OutputLost, so that a start ends whose lines nobody can read. `mention` and `complain` never raise:
    neither a shutdown nor a failure may be cut short by a terminal that has gone."""

    def __init__(self, told: Callable[[str], str] = str) -> None:
        self._told = told
        self._out, self._errors = sys.stdout.fileno(), sys.stderr.fileno()
        self.log: Path | None = None

    def say(self, text: str) -> None:
        _write(self._out, self._told(text))

    def mention(self, text: str) -> None:
        with suppress(OutputLost):
            self.say(text)

    def complain(self, text: str) -> None:
        """Write to standard error, with the path of the log once there is one."""
        told = self._told(text)
        with suppress(OutputLost):
            _write(self._errors, told if self.log is None else f"{told}\nlog: {self.log}")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Send everything else that this process and its children print to a log file, until the process ends.
        Redirects file descriptors, because Ray prints from several threads, and from C++."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            log = _log_directory() / f"serve-run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        except OSError as error:
            self.say(f"Ray's output is shown here, because its log cannot be written: {error}")
            yield
            return
        self.log, self._out, self._errors = log, os.dup(1), os.dup(2)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        yield


def _write(descriptor: int, text: str) -> None:
    rest = f"{text}\n".encode()
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        raise OutputLost(error) from error


def _log_directory() -> Path:
    """Return this user's directory for logs, beside Ray's own files."""
    chosen = os.environ.get("RAY_TMPDIR")
    return own_directory("chunkserve-logs", Path(chosen) if chosen else None)
