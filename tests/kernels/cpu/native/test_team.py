"""The threads of a team by themselves: every item once, in order, and nobody waits for a thread that is put aside."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kernels.cpu.native.library import SOURCE_DIR
from tests.support.compiler import needs_compiler

pytestmark = needs_compiler

SOURCE = Path(__file__).with_name("team_alone.cpp")
SANITIZED = ("-O1", "-g", "-fsanitize=thread")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder, flags = tmp_path_factory.mktemp("team"), ("-std=c++20", "-pthread", f"-I{SOURCE_DIR}")
    found = {}
    for name, own in (("plain", ("-O2",)), ("sanitized", SANITIZED)):
        found[name] = folder / name
        subprocess.run(["g++", *flags, *own, str(SOURCE), "-o", str(found[name])], check=True, timeout=200)
    return found


def run(program: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), what], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("name", ["plain", "sanitized"])
def test_every_item_is_done_once_before_what_comes_next(programs: Mapping[str, Path], name: str) -> None:
    """`sanitized`: memory that two threads use without an order between them ends the run, too."""
    done = run(programs[name], "everything")
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_thread_that_is_put_aside_is_not_waited_for(programs: Mapping[str, Path]) -> None:
    """In a server, other processes had one of two cores for half a millisecond when a step began. The thread at work
    waited for the other one to come, and a token took a tenth longer."""
    done = run(programs["plain"], "without")
    assert done.returncode == 0, done.stderr[-3000:]
