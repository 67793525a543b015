"""Owns what a user of `serve run` sees: lines of ours on the terminal, and all that Ray prints in a file.
Never decides what is worth a line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.host.own_directory import own_directory

VARIABLE = "CHUNKSERVE_VERBOSE"
"""`1`: as with --verbose."""


class Console:
    """Where lines go; the two are the process's own until `quiet`."""

    def __init__(self) -> None:
        self._out, self._errors = sys.stdout.fileno(), sys.stderr.fileno()
        self.log: Path | None = None

    def say(self, text: str) -> None:
        _write(self._out, text)

    def complain(self, text: str) -> None:
        """On standard error, with the log's place once there is one."""
        _write(self._errors, text if self.log is None else f"{text}\nlog: {self.log}")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """From now on, and until the process ends, all else that it and its children print goes to a log file. By file
        descriptor: Ray prints from several threads, and from C++."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            log = _log_directory() / f"serve-run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        except OSError as error:
            self.say(f"what Ray prints follows, for its log cannot be written: {error}")
            yield
            return
        self.log, self._out, self._errors = log, os.dup(1), os.dup(2)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        yield


def _write(descriptor: int, text: str) -> None:
    rest = f"{text}\n".encode()
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _log_directory() -> Path:
    """This user's, beside Ray's own files."""
    chosen = os.environ.get("RAY_TMPDIR")
    return own_directory("chunkserve-logs", Path(chosen) if chosen else None)
