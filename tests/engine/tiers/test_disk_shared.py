"""Engines of several processes share a directory: each sees what others do, all hold one bound, any may be killed."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from engine.tiers.faults import TierFault
from engine.tiers.ledger import Ledger
from tests.support.disk_tiers import (
    FILE_BYTES,
    KEY,
    Watch,
    bytes_on_disk,
    digest,
    files,
    is_right,
    loaded,
    opened,
    process,
    store,
    until,
)

ENGINE = """
import sys
from pathlib import Path
from tests.support.disk_tiers import *
with opened(Path(sys.argv[1]), poll_s=0.01) as tier:
    print("ready", flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        numbers = [int(number) for number in numbers]
        if command == "store":
            store(tier, *numbers)
            print("done", flush=True)
        elif command == "read":
            print([number for number in numbers if is_right(tier, number)], flush=True)
        elif command == "reset":
            print(tier.reset(), flush=True)
"""

WRITER = """
import sys
from pathlib import Path
from engine.tiers import ledger
from tests.support.disk_tiers import *
path, capacity, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ledger.LOCK_S = 60.0  # whatever else the machine does
with opened(path, capacity_bytes=capacity, poll_s=0.01) as tier:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(first, first + 80):
        store(tier, number)
        if number % 3 == 0:
            is_right(tier, number - 50)
"""

KILLED = """
import itertools, sys, threading
from pathlib import Path
from tests.support.disk_tiers import *
path, first = Path(sys.argv[1]), int(sys.argv[2])

def work(tier, numbers):
    for number in numbers:
        store(tier, number)
        os.write(1, b"%d\\n" % number)  # in one piece, whenever the end comes

with opened(path, capacity_bytes=2**40, key=KEY if sys.argv[3] == "True" else None) as tier:
    print("ready", flush=True)
    threads = [threading.Thread(target=work, args=(tier, itertools.count(first + of, 3))) for of in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def ask(child: subprocess.Popen[str], line: str) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    print(line, file=child.stdin, flush=True)
    return child.stdout.readline().strip()


def test_what_one_engine_writes_another_reads_at_once_and_is_told_of_soon(tmp_path: Path) -> None:
    with opened(tmp_path, poll_s=0.01) as tier, process(ENGINE, tmp_path) as child:
        watch = Watch(tier)
        assert ask(child, "store 1 2") == "done"
        assert is_right(tier, 1)
        watch.until(lambda: watch.present == {digest(1): True, digest(2): True})
        store(tier, 3)
        assert ask(child, "read 1 2 3 4") == "[1, 2, 3]"


def test_what_one_engine_resets_no_other_reads_and_all_are_told(tmp_path: Path) -> None:
    with opened(tmp_path, poll_s=0.01) as tier, process(ENGINE, tmp_path) as child:
        watch = Watch(tier)
        store(tier, 1)
        assert ask(child, "store 2") == "done"
        watch.until(lambda: watch.present.get(digest(2)))
        assert ask(child, "store 1") == "done", "which tells it of the file"
        assert ask(child, "reset") == "2"
        watch.until(lambda: watch.present == {digest(1): False, digest(2): False})
        assert ask(child, "read 1 2") == "[]"
        store(tier, 3)
        assert ask(child, "read 1 2 3") == "[3]"


def test_a_write_that_does_not_know_of_anothers_reset_yet_is_discarded_and_the_next_is_not(tmp_path: Path) -> None:
    with opened(tmp_path) as tier, opened(tmp_path) as other:
        store(tier, 1)
        assert other.reset() == 0, "it has not looked since"
        until(lambda: not list((tmp_path / "v2").glob("trash-*")))
        with pytest.raises(TierFault, match="was reset"):
            store(tier, 2)
        store(tier, 3)
        assert [number for number in range(5) if is_right(other, number)] == [3]
        assert not is_right(tier, 1)


def test_a_file_that_another_engine_evicted_is_a_fault_and_told_of(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        store(tier, 1, 2, 3)
        with opened(tmp_path, capacity_bytes=2 * FILE_BYTES):
            pass
        gone = [number for number in (1, 2, 3) if not is_right(tier, number)]
        assert gone
        with pytest.raises(TierFault, match="No such file"):
            loaded(tier, gone[0])
        tier.refresh()
        assert {(digest(number), False) for number in gone} <= set(tier.take_changes())


def test_three_engines_that_write_at_once_hold_one_bound(tmp_path: Path) -> None:
    capacity, blocks = 40 * FILE_BYTES, []
    with opened(tmp_path, capacity_bytes=capacity):
        pass
    ledger = Ledger(tmp_path / "v2/lock")
    with (
        process(WRITER, tmp_path, capacity, 0) as first,
        process(WRITER, tmp_path, capacity, 1000) as second,
        process(WRITER, tmp_path, capacity, 2000) as third,
    ):
        children = (first, second, third)
        for child in children:
            assert child.stdin is not None
            print(file=child.stdin, flush=True)
        while any(child.poll() is None for child in children):
            with ledger.hold(30.0):
                blocks.append(bytes_on_disk(tmp_path))
            with suppress(subprocess.TimeoutExpired):
                third.wait(0.02)  # and leave the lock to them
        assert [child.wait() for child in children] == [0, 0, 0]
    ledger.close()
    assert max(blocks) <= capacity
    with opened(tmp_path, capacity_bytes=capacity) as tier:
        right = sum(is_right(tier, number) for first in (0, 1000, 2000) for number in range(first, first + 80))
        assert right == len(files(tmp_path)) > 0
        assert bytes_on_disk(tmp_path) == tier.sizes()[1] <= capacity


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_what_a_killed_engine_wrote_is_right_and_what_it_was_writing_is_gone(
    tmp_path: Path, key: bytes | None, kills: int
) -> None:
    written: set[int] = set()
    for kill in range(kills):
        with process(KILLED, tmp_path, 10_000 * kill, key is not None) as child:
            assert child.stdout is not None
            written |= {int(child.stdout.readline()) for _ in range(20 + 7 * kill)}
            child.kill()
            written |= {int(line) for line in child.stdout.read().split()}
    with opened(tmp_path, capacity_bytes=2**40, key=key) as tier:
        assert not [number for number in written if not is_right(tier, number)], "a write that had ended was lost"
        found = [number for kill in range(kills) for number in range(10_000 * kill, 10_000 * kill + 5_000)]
        assert sum(is_right(tier, number) for number in found) == len(files(tmp_path)), "and nothing else is there"
        assert not list((tmp_path / "v2/writing").glob("*.*"))
        assert bytes_on_disk(tmp_path) == tier.sizes()[1]
