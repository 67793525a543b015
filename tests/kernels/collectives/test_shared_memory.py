"""The group of one machine's processes: its files, its start, and which rank the others wait for.
Never depends on time: a limit is far longer than what it limits."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from kernels.collectives.group import RankLostError
from kernels.collectives.shared_memory import SharedMemoryGroup, new_directory
from tests.kernels.collectives import jobs
from tests.kernels.collectives.conftest import Make
from tests.kernels.collectives.jobs import joined
from tests.support.compiler import needs_compiler
from tests.support.ranks import LostResult, run_ranks
from tests.support.seeds import next_seed

pytestmark = needs_compiler


def pair(directory: Path) -> tuple[SharedMemoryGroup, SharedMemoryGroup]:
    """Both ends of a group, in this process."""
    found: list[SharedMemoryGroup] = []
    follower = threading.Thread(target=lambda: found.append(joined(directory, rank=1, size=2)))
    follower.start()
    leader = joined(directory, rank=0, size=2)
    follower.join()
    return leader, found[0]


def test_a_directory_is_private_and_gone_once_all_have_joined() -> None:
    directory = new_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent == Path("/dev/shm")
    leader, follower = pair(directory)
    assert not directory.exists()
    leader.close()
    follower.close()


def test_nothing_is_left_of_a_group_that_is_closed() -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("/segment")
        return maps, len(os.listdir("/proc/self/fd"))

    before = held()
    leader, follower = pair(new_directory())
    assert held() > before
    leader.close()
    follower.close()
    follower.close()
    assert held() == before


def test_a_call_after_the_end_is_refused() -> None:
    leader, follower = pair(new_directory())
    leader.close()
    with pytest.raises(RankLostError, match="closed its group"):
        leader.all_reduce(torch.ones(4))
    with pytest.raises(RankLostError, match="Rank 0 has left"):
        follower.receive()
    follower.close()


def test_giving_up_ends_the_call_that_another_thread_is_in() -> None:
    leader, follower = pair(new_directory())
    messages: list[str] = []

    def sum_alone() -> None:
        with pytest.raises(RankLostError) as lost:
            leader.all_reduce(torch.ones(4))
        messages.append(str(lost.value))

    thread = threading.Thread(target=sum_alone)
    thread.start()
    leader.give_up("the engine ends")
    leader.close()  # which waits for the thread's call
    thread.join()
    assert messages == ["Rank 0 gave up: the engine ends."]
    follower.close()


def test_a_group_that_never_forms_is_waited_for_as_long_as_the_caller_wants_and_leaves_no_files() -> None:
    directory = new_directory()
    with pytest.raises(RankLostError, match=r"no group within 0.3 s"):
        joined(directory, rank=0, size=2, timeout_s=0.3)
    assert not directory.exists()
    directory = new_directory()
    with pytest.raises(RankLostError, match=r"no group within 0.3 s"):
        joined(directory, rank=1, size=2, timeout_s=0.3)
    assert not directory.exists()


def test_a_second_process_cannot_be_the_same_rank_and_harms_nobody() -> None:
    directory = new_directory()
    leaders: list[SharedMemoryGroup] = []
    thread = threading.Thread(target=lambda: leaders.append(joined(directory, rank=0, size=2)))
    thread.start()
    while not (directory / "segment").exists():
        thread.join(0.001)
    with pytest.raises(FileExistsError, match="another process is this rank"):
        joined(directory, rank=0, size=2)
    joined(directory, rank=1, size=2).close()
    thread.join()
    leaders[0].close()
    assert not directory.exists()


def test_ranks_must_say_the_same_sizes() -> None:
    directory = new_directory()
    refused: list[str] = []

    def follow() -> None:
        with pytest.raises(OSError, match="was not made for 2 ranks with slots of 128 bytes") as error:
            joined(directory, rank=1, size=2, slot_bytes=128)
        refused.append(str(error.value))

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(RankLostError, match="no group"):
        joined(directory, rank=0, size=2, timeout_s=0.5)
    thread.join()
    assert refused


def test_too_large_a_segment_is_refused_and_not_a_crash_later() -> None:
    directory = new_directory()
    with pytest.raises(OSError, match="has no room for"):
        joined(directory, rank=0, size=2, slot_bytes=1 << 45)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2, "size": 2}, "rank 2 of 2: expected 2 to 64 ranks, numbered from 0"),
        ({"rank": 0, "size": 1}, "rank 0 of 1"),
        ({"rank": 0, "size": 65}, "rank 0 of 65"),
        ({"rank": 0, "size": 2, "slot_bytes": 100}, "slot_bytes is 100: expected a positive multiple of 64"),
        ({"rank": 0, "size": 2, "message_bytes": 0}, "message_bytes is 0"),
        ({"rank": 0, "size": 2, "timeout_s": 0}, "^timeout_s is 0: expected a positive number"),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_the_field(wrong: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        SharedMemoryGroup(tmp_path, **wrong)


def test_a_rank_that_nobody_has_reaped_is_dead(memory: Make) -> None:
    found, other = run_ranks(jobs.alone, 1, jobs.outlive_a_zombie, new_directory())[0]
    assert (found, other) == ("Rank 1 has died.", "Z")


def test_thousands_of_rounds_in_memory_neither_stop_nor_mix(memory: Make) -> None:
    assert run_ranks(memory(), 4, jobs.many_rounds, 2000, next_seed() % 1000) == [0] * 4


def test_ranks_that_sum_different_things_are_stopped(memory: Make) -> None:
    found = run_ranks(memory(), 3, jobs.sum_different_things)
    assert all(isinstance(message, LostResult) for message in found)
    assert len(set(found)) == 1
    assert "sums 5 float32" in found[0]
    assert "sums 4 float32" in found[0]


def test_the_rank_that_the_others_wait_for_is_charged(memory: Make) -> None:
    found = run_ranks(memory(), 3, jobs.be_late, 1)
    assert found[0] == found[1] == found[2]
    assert found[0][1] == max(found[0]) > 0
