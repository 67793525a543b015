"""Contracts of the process that kills a hung replica: it kills nothing else, and never stays behind."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from serve_app.replicas import watchdog as watchdog_module
from serve_app.replicas import watchdog_process
from serve_app.replicas.watchdog import Watchdog

TIMEOUT_S = 60  # only ever reached by a failure
PARENT = """
import asyncio, os, signal, sys, ctypes
from serve_app.replicas.watchdog import Watchdog

async def main():
    watchdog = Watchdog({seconds}, {is_well})
    print(watchdog._process.pid, flush=True)
    await asyncio.sleep(0)
    {then}

asyncio.run(main())
"""
FORK = """if os.fork() == 0:
        os.close(1), os.close(2), os.read(0, 1)  # until the test ends
    os._exit(0)"""


@pytest.fixture
def parents() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate(timeout=TIMEOUT_S)


def start(parents: list[subprocess.Popen[str]], then: str, seconds: float = 1, is_well: str = "lambda: True") -> int:
    """Start a process with a watchdog that then does `then`;
    return a handle of the watchdog, which outlives the process."""
    script = PARENT.format(then=then, seconds=seconds, is_well=is_well)
    pipe = subprocess.PIPE
    parents.append(subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    stdout = parents[-1].stdout
    assert stdout is not None
    return os.pidfd_open(int(stdout.readline()))


def wait_for_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    try:
        assert poll.poll(TIMEOUT_S * 1000), "the watchdog is still there"
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    ("then", "is_well"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", "lambda: True", id="stopped"),
        pytest.param("ctypes.PyDLL(None).sleep(3600)", "lambda: True", id="holds the interpreter lock"),
        pytest.param("await asyncio.sleep(3600)", "lambda: False", id="not well by its own account"),
    ],
)
def test_a_process_that_hangs_is_killed_and_its_watchdog_is_gone(
    parents: list[subprocess.Popen[str]], then: str, is_well: str
) -> None:
    watchdog = start(parents, then, is_well=is_well)
    assert parents[0].wait(TIMEOUT_S) == -signal.SIGKILL
    wait_for_end(watchdog)
    assert f"process {parents[0].pid} has hung for 1 s and is killed" in parents[0].communicate(timeout=TIMEOUT_S)[1]


@pytest.mark.parametrize(
    ("then", "status"),
    [
        pytest.param("pass", 0, id="ends"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="is killed"),
        pytest.param("os._exit(3)", 3, id="leaves at once"),
        pytest.param(FORK, 0, id="has a child that holds the pipe open and lives on"),
    ],
)
def test_a_watchdog_ends_with_its_process(parents: list[subprocess.Popen[str]], then: str, status: int) -> None:
    watchdog = start(parents, then, seconds=3600)
    assert parents[0].wait(TIMEOUT_S) == status
    wait_for_end(watchdog)


class Pipe:
    """A pipe with scripted looks: True where something has come."""

    def __init__(self, *looks: bool) -> None:
        self.looks = list(looks)

    def register(self, *what: Any) -> None: ...

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        return [(0, select.POLLIN)] if self.looks.pop(0) else []


@pytest.mark.parametrize(
    ("looks", "num_left"),
    [([False] * 5, 2), ([False, False, True, False, False, False], 0), ([True, False, False, False], 0)],
)
def test_only_looks_in_a_row_that_find_nothing_are_a_silence(
    monkeypatch: pytest.MonkeyPatch, looks: list[bool], num_left: int
) -> None:
    pipe = Pipe(*looks)
    monkeypatch.setattr(watchdog_process.select, "poll", lambda: pipe)
    monkeypatch.setattr(watchdog_process.os, "read", lambda *what: b".")
    assert watchdog_process.watch(os.getppid(), 0, 3)
    assert len(pipe.looks) == num_left


def test_a_process_that_is_no_longer_the_parent_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id may belong to another process by then."""
    killed: list[int] = []
    monkeypatch.setattr(watchdog_process.os, "kill", lambda pid, signum: killed.append(pid))
    watchdog_process.kill(os.getpid())
    assert not killed
    watchdog_process.kill(os.getppid())
    assert killed == [os.getppid()]


@pytest.mark.anyio
async def test_a_process_whose_watchdog_has_ended_goes_on_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = logging.Logger("watchdog")  # other tests may have changed the loggers
    own.addHandler(caplog.handler)
    monkeypatch.setattr(watchdog_module, "logger", own)
    watchdog = Watchdog(3600)
    try:
        watchdog._process.kill()
        watchdog._process.wait()
        await watchdog._feeding
    finally:
        watchdog.end()
    assert "the watchdog of this process has ended" in caplog.text


def test_the_watchdog_needs_nothing_but_python() -> None:
    """It stays beside every replica, for as long as that lives."""
    code = f"import runpy, sys; runpy.run_path({watchdog_process.__file__!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "signal" in imported
    assert imported <= sys.stdlib_module_names | {"__main__"}
