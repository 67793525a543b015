"""Runs `chunkserve` as a user does, as a process of its own.
Never needs the installed script, which an older installation of this checkout may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from loadtest.server import ROOT

COMMAND = (sys.executable, "-m", "serve_app.front.command")


def environment(changes: Mapping[str, str] = {}) -> dict[str, str]:
    """Return this process's environment, in which the checkout's modules are found from any directory."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def chunkserve(
    *words: str,
    env: Mapping[str, str] = {},
    said: str | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. said: its standard input."""
    return subprocess.run(
        [*COMMAND, *words],
        input=said,
        stdin=subprocess.DEVNULL if said is None else None,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(env),
        cwd=cwd,
        check=False,
    )


def refusal(*words: str, env: Mapping[str, str] = {}, cwd: Path | None = None) -> str:
    """Run a command that must refuse its input, and return the only line that it may print."""
    done = chunkserve(*words, env=env, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    return line
