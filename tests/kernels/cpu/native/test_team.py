"""The threads of a team by themselves: every item once, in order, and nobody waits for a thread that is put aside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.native.library import SOURCE_DIR
from tests.support.compiler import COMPILER, needs_compiler

pytestmark = needs_compiler

SOURCE = Path(__file__).with_name("team_alone.cpp")


def built(folder: Path, *flags: str) -> Path:
    """Compile what runs the threads."""
    target = folder / "team"
    common = ("-std=c++20", "-pthread", f"-I{SOURCE_DIR}", str(SOURCE), "-o", str(target))
    subprocess.run([COMPILER, *flags, *common], check=True, timeout=200)
    return target


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("plain"), "-O2")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_item_is_done_once_before_what_comes_next(plain: Path) -> None:
    run(str(plain), "in_order")


def test_two_threads_use_no_memory_without_an_order_between_them(tmp_path: Path) -> None:
    """By the compiler's own check, which does not know memory whose place is too random."""
    program = built(tmp_path, "-O1", "-g", "-fsanitize=thread")
    run("setarch", "-R", str(program), "in_order")
    run("setarch", "-R", str(program), "asleep")


def test_a_thread_that_is_put_aside_is_not_waited_for(plain: Path) -> None:
    """In a server, other processes had one of two cores for half a millisecond when a step began. The thread at work
    waited for the other one to come, and a token took a tenth longer."""
    run(str(plain), "without")


def test_a_thread_that_sleeps_is_woken_to_help_and_wakes_who_waits_for_it(plain: Path) -> None:
    run(str(plain), "asleep")


def test_a_thread_that_is_put_aside_at_any_moment_takes_no_part_of_another_share(plain: Path) -> None:
    run(str(plain), "interrupted")


WITHOUT_ROOM = """
import resource
from pathlib import Path
from kernels.cpu.native.program import Team
Team(2)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
no_limit = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), no_limit))  # of 511 stacks, 8 MiB each
try:
    Team(512)
except RuntimeError as refused:
    print(refused)
resource.setrlimit(resource.RLIMIT_AS, (no_limit, no_limit))
print(len(list(Path("/proc/self/task").iterdir())) < 100)
"""


def test_threads_that_the_system_does_not_grant_are_refused_by_their_number() -> None:
    """Regression guard: the process was aborted without a word, and those that had begun were left behind."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused, few = done.stdout.splitlines()
    assert refused.startswith("num_threads: the system does not grant 512 threads")
    assert few == "True"
