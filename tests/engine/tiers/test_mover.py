"""Owns the contract of the mover (engine.kv_tiers.KvMover), over blocks and files that are stand-ins. Long, because
every fault has its place.
Never needs a model: tests of the copiers do."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.kv_tiers import BUSY, BlockMove, KvMover, MoveKind, Tier, TierChange, TierSize
from engine.tiers import mover as mover_module
from engine.tiers.faults import TierFault
from engine.tiers.loads import READERS
from engine.tiers.mover import TierMover
from engine.tiers.stores import FORGOTTEN, queued_writes
from tests.support.kv_tiers import BLOCK_BYTES, TIMEOUT_S, Ends, MemoryCopier, MemoryFiles, load, store
from tests.support.seeds import next_seed

HOST, DISK = Tier.HOST, Tier.DISK
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
QUEUED = queued_writes(BLOCK_BYTES)


class Rig:
    """A mover of 16 blocks with both tiers."""

    def __init__(self, host_blocks: int = 8, write_batch: int = 1) -> None:
        self.copier, self.files = MemoryCopier(16, write_batch=write_batch), MemoryFiles()
        for number, block in enumerate(self.copier.blocks):
            block[:] = bytes([number + 1]) * BLOCK_BYTES
        self.mover = TierMover(self.copier, host_blocks=host_blocks, files=self.files)
        self.ends = Ends(self.mover)

    def open(self) -> None:
        for gate in (self.copier.reading, self.copier.writing, self.copier.landing):
            gate.open()
        self.files.reading.open()
        self.files.writing.open()

    def begin(self, *moves: BlockMove, dropped: Any = ()) -> tuple[BlockMove, ...]:
        self.mover.begin(moves, dropped)
        return moves

    def run(self, *moves: BlockMove, dropped: Any = ()) -> list[str]:
        """Run moves to their ends; return their errors in their order."""
        return self.ends.errors(*self.begin(*moves, dropped=dropped))

    def block(self, number: int) -> set[int]:
        """Return the values of a block's bytes: one, unless its content is mixed."""
        return {*self.copier.blocks[number]}

    def wipe(self, number: int) -> None:
        self.copier.blocks[number][:] = bytes(BLOCK_BYTES)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Return a function that makes a rig, whose threads end with the test."""
    rigs: list[Rig] = []

    def made(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.open()
        rig.mover.shutdown()


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_a_block_comes_back_from_a_tier_into_any_block(rig: Rig, tier: Tier) -> None:
    assert rig.run(store(tier, A, 3), store(tier, B, 5)) == ["", ""]
    rig.wipe(3)
    assert rig.run(load(tier, A, 9), load(tier, B, 3)) == ["", ""]
    assert (rig.block(9), rig.block(3), rig.block(5)) == ({4}, {6}, {6})


def test_a_mover_is_the_contracts_and_says_which_tiers_it_has(make: Callable[..., Rig]) -> None:
    both: KvMover = make().mover
    assert (both.tiers, both.host_blocks, both.block_bytes) == ((HOST, DISK), 8, BLOCK_BYTES)
    alone = TierMover(MemoryCopier(1), host_blocks=2)
    assert (alone.tiers, alone.host_blocks, alone.take_changes(), alone.reset()) == ((HOST,), 2, [], 0)
    alone.shutdown()
    files = TierMover(MemoryCopier(1), files=MemoryFiles())
    assert (files.tiers, files.host_blocks) == ((DISK,), 0)
    files.shutdown()


def test_results_name_their_moves_with_bytes_and_seconds(rig: Rig) -> None:
    moves = rig.begin(store(HOST, A, 0), store(DISK, A, 0), store(DISK, B, 1))
    moves += rig.begin(load(HOST, A, 4))
    results = rig.ends.of(*moves)
    assert {result.move for result in results} == {*moves}
    assert all(result.num_bytes == BLOCK_BYTES and result.seconds > 0 and not result.error for result in results)
    assert rig.mover.take_results() == []


def test_a_block_for_both_tiers_is_copied_once_and_blocks_of_a_call_together(rig: Rig) -> None:
    rig.run(store(HOST, A, 3), store(HOST, B, 4), store(DISK, A, 3), store(DISK, C, 5))
    assert rig.copier.reads == [(3, 4, 5)]
    assert rig.files.files == {A: bytes([4]) * BLOCK_BYTES, C: bytes([6]) * BLOCK_BYTES}


@pytest.mark.parametrize("tiers", [(HOST,), (DISK,), (HOST, DISK)])
def test_a_store_keeps_the_bytes_from_before_its_block_is_overwritten(rig: Rig, tiers: tuple[Tier, ...]) -> None:
    """The step whose plan has the store may give the block to somebody else."""
    rig.files.writing.close()
    stores = rig.begin(*(store(tier, A, 3) for tier in tiers))
    rig.wipe(3)
    rig.files.writing.open()
    assert rig.ends.errors(*stores) == [""] * len(tiers)
    for tier in tiers:
        assert rig.run(load(tier, A, 9)) == [""]
        assert rig.block(9) == {4}
        rig.wipe(9)


def test_a_load_into_the_block_that_the_same_call_stores_comes_after_it(rig: Rig) -> None:
    rig.run(store(HOST, A, 3))
    assert rig.run(load(HOST, A, 5), store(HOST, B, 5)) == ["", ""]
    assert rig.block(5) == {4}
    rig.run(load(HOST, B, 6))
    assert rig.block(6) == {6}


def test_a_store_of_what_the_host_tier_has_is_done_and_changes_nothing(rig: Rig) -> None:
    rig.run(store(HOST, A, 3))
    assert rig.run(store(HOST, A, 4), store(HOST, B, 5), store(HOST, B, 6)) == ["", "", ""]
    assert rig.run(load(HOST, A, 9), load(HOST, B, 10)) == ["", ""]
    assert (rig.block(9), rig.block(10)) == ({4}, {6})
    assert rig.mover.sizes()[0].used_bytes == 2 * BLOCK_BYTES


# --- drops -----------------------------------------------------------------------------------------------------------


def test_what_was_dropped_is_not_there(rig: Rig) -> None:
    rig.run(store(HOST, A, 3), store(DISK, B, 4))
    assert "no such block" in rig.run(load(HOST, A, 9), dropped=[(HOST, A)])[0]
    rig.run(store(DISK, C, 1), dropped=[(DISK, B)])
    assert "there is no block" in rig.run(load(DISK, B, 9))[0]
    assert rig.block(9) == {10}, "a load that failed before its copy wrote nothing"


def test_a_drop_comes_before_the_stores_of_its_call(make: Callable[..., Rig]) -> None:
    """A full host tier takes a block in the place of one that the same call drops; a file is removed, then written."""
    rig = make(host_blocks=1)
    rig.run(store(HOST, A, 3), store(DISK, A, 3))
    assert rig.run(store(HOST, B, 4), store(DISK, A, 5), dropped=[(HOST, A), (DISK, A)]) == ["", ""]
    assert rig.run(load(HOST, B, 9), load(DISK, A, 10)) == ["", ""]
    assert (rig.block(9), rig.block(10)) == ({5}, {6})


def test_a_file_that_waits_to_be_written_is_dropped_after_it(rig: Rig) -> None:
    rig.files.writing.close()
    (waiting,) = rig.begin(store(DISK, A, 3))
    rig.begin(dropped=[(DISK, A)])
    rig.files.writing.open()
    assert rig.ends.errors(waiting) == [""]
    rig.run(store(DISK, B, 4))
    assert [*rig.files.files] == [B]


def test_a_row_is_not_used_again_while_its_file_is_written(make: Callable[..., Rig]) -> None:
    """The host tier has one row: dropped while the writer reads it, it was overwritten by the next store."""
    rig = make(host_blocks=1)
    rig.files.writing.close()
    first = rig.begin(store(HOST, A, 3), store(DISK, A, 3))
    rig.files.writing.wait_for_caller()
    second = rig.begin(store(HOST, B, 4), dropped=[(HOST, A)])
    rig.files.writing.open()
    assert rig.ends.errors(*first, *second) == ["", "", ""]
    assert rig.files.files[A] == bytes([4]) * BLOCK_BYTES
    assert rig.run(load(HOST, B, 9)) == [""]
    assert rig.block(9) == {5}


def test_a_row_is_not_used_again_while_a_load_waits_for_it(make: Callable[..., Rig]) -> None:
    rig = make(host_blocks=1)
    rig.run(store(HOST, A, 3))
    rig.copier.writing.close()
    (waiting,) = rig.begin(load(HOST, A, 9))
    rig.copier.writing.wait_for_caller()
    held = rig.begin(store(HOST, B, 4), dropped=[(HOST, A)])
    rig.copier.writing.open()
    assert rig.ends.errors(waiting, *held)[0] == ""
    assert rig.block(9) == {4}
    assert rig.run(store(HOST, B, 4)) == [""], "the row is free again"


# --- a tier without room ---------------------------------------------------------------------------------------------


def test_a_disk_that_is_behind_is_busy_at_once_and_takes_stores_again_later(rig: Rig) -> None:
    rig.files.writing.close()
    digests = [bytes([number]) * 16 for number in range(QUEUED)]
    queued = rig.begin(*(store(DISK, digest, 3) for digest in digests))
    refused = rig.begin(store(DISK, A, 4), store(HOST, A, 4))
    by_move = {result.move: result.error for result in rig.mover.take_results()}
    assert by_move == {refused[0]: BUSY, refused[1]: ""}
    rig.files.writing.open()
    assert rig.ends.errors(*queued) == [""] * QUEUED
    assert rig.run(*(store(DISK, digest, 5) for digest in digests)) == [""] * QUEUED
    assert {*rig.files.files} == {*digests}


def test_a_full_host_tier_is_busy_and_its_blocks_stay(make: Callable[..., Rig]) -> None:
    rig = make(host_blocks=2)
    assert rig.run(store(HOST, A, 1), store(HOST, B, 2), store(HOST, C, 3), store(DISK, C, 3)) == ["", "", BUSY, ""]
    assert rig.run(load(HOST, A, 9), load(HOST, B, 10), load(DISK, C, 11)) == ["", "", ""]
    assert (rig.block(9), rig.block(10), rig.block(11)) == ({2}, {3}, {4})


def test_a_copier_without_room_is_busy_for_the_blocks_beyond_it(rig: Rig) -> None:
    rig.copier.free_rows = 1
    assert rig.run(store(HOST, A, 1), store(DISK, A, 1), store(HOST, B, 2), store(DISK, B, 2)) == ["", "", BUSY, BUSY]
    assert rig.run(store(HOST, B, 2), store(HOST, A, 7)) == ["", ""], "what is there already needs no room"


def test_stores_that_were_refused_hold_neither_rows_nor_places(make: Callable[..., Rig]) -> None:
    rig = make(host_blocks=2)
    rig.copier.free_rows = 0
    for _ in range(QUEUED + READERS + 8):
        assert rig.run(store(HOST, A, 1), store(DISK, A, 1)) == [BUSY, BUSY]
    rig.copier.free_rows = 100
    assert rig.run(store(HOST, A, 1), store(DISK, A, 1), store(HOST, B, 2)) == ["", "", ""]
    for _ in range(QUEUED + READERS + 8):
        assert rig.run(store(HOST, C, 3)) == [BUSY]
    assert rig.run(store(DISK, C, 3)) == [""]
    assert rig.run(store(HOST, C, 3), dropped=[(HOST, A)]) == [""]


def test_a_file_is_written_once_its_block_has_come_from_the_device(rig: Rig) -> None:
    rig.copier.landing.close()
    (written,) = rig.begin(store(DISK, A, 3))
    rig.copier.landing.wait_for_caller()
    assert not rig.files.files
    rig.copier.landing.open()
    assert rig.ends.errors(written) == [""]


# --- cancelled loads -------------------------------------------------------------------------------------------------


def test_a_load_that_is_cancelled_while_its_file_is_read_never_writes(rig: Rig) -> None:
    rig.run(store(DISK, A, 3))
    rig.files.reading.close()
    (given_up,) = rig.begin(load(DISK, A, 9))
    rig.files.reading.wait_for_caller()
    rig.mover.cancel([given_up.move_id])
    rig.files.reading.open()
    later = [load(DISK, A, number) for number in (10, 11, 12)]
    assert {result.move for result in rig.ends.of(*rig.begin(*later))} == {*later}
    assert rig.block(9) == {10}
    assert {number for write in rig.copier.writes for number in write} == {10, 11, 12}


def test_loads_that_wait_in_line_are_cancelled_without_a_result(rig: Rig) -> None:
    rig.run(store(HOST, A, 3))
    rig.copier.writing.close()
    first, *waiting = rig.begin(*(load(HOST, A, number) for number in (9, 10, 11)))
    rig.copier.writing.wait_for_caller()
    rig.mover.cancel([move.move_id for move in waiting])
    rig.copier.writing.open()
    (later,) = rig.begin(load(HOST, A, 12))
    assert [result.move for result in rig.ends.of(first, later)] == [first, later]
    assert (rig.block(9), rig.block(10), rig.block(11), rig.block(12)) == ({4}, {11}, {12}, {4})


class Watched(threading.Condition):
    """A condition that says when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        self.waited.set()
        return super().wait_for(predicate, timeout)


def test_cancel_returns_only_when_a_copy_that_has_begun_is_done(rig: Rig) -> None:
    """Returned before, the block's next owner would be overwritten."""
    watched = rig.mover._loads._changed = Watched()
    rig.run(store(HOST, A, 3))
    rig.copier.writing.close()
    (given_up,) = rig.begin(load(HOST, A, 9))
    rig.copier.writing.wait_for_caller()

    def cancel() -> None:
        rig.mover.cancel([given_up.move_id])
        rig.copier.log.append("cancelled")

    thread = in_a_thread(cancel)
    assert watched.waited.wait(TIMEOUT_S), "it does not wait"
    rig.copier.writing.open()
    thread.join(TIMEOUT_S)
    assert rig.copier.log == ["wrote", "cancelled"]
    (later,) = rig.begin(load(HOST, A, 12))
    assert [result.move for result in rig.ends.of(later)] == [later], "a cancelled load has no result"


def test_a_copy_that_is_under_way_on_a_device_is_held_before_later_steps(rig: Rig) -> None:
    rig.run(store(HOST, A, 3))
    rig.copier.landing.close()
    (given_up,) = rig.begin(load(HOST, A, 9))
    rig.copier.landing.wait_for_caller()
    rig.mover.cancel([given_up.move_id])
    assert rig.copier.held == 1
    rig.copier.landing.open()


def test_a_result_that_was_not_taken_goes_with_its_cancelled_load(rig: Rig) -> None:
    rig.run(store(HOST, A, 3), store(HOST, B, 4))
    (loaded,) = rig.begin(load(HOST, A, 9))
    (later,) = rig.begin(load(HOST, B, 10))
    (another,) = rig.begin(store(DISK, B, 4))
    ended = rig.ends.of(later, another)
    rig.mover._results.put(result for result in ended if result.move in (loaded, another))
    rig.mover.cancel([loaded.move_id, another.move_id, 10**9])
    assert [result.move for result in rig.mover.take_results()] == [another], "only loads are given up"


def test_a_second_cancel_of_a_load_does_nothing(rig: Rig) -> None:
    rig.run(store(HOST, A, 3))
    (loaded,) = rig.begin(load(HOST, A, 9))
    rig.ends.of(loaded)
    rig.mover.cancel([loaded.move_id])
    rig.mover.cancel([loaded.move_id])
    assert rig.run(load(HOST, A, 10)) == [""]


# --- faults ----------------------------------------------------------------------------------------------------------

FAULTS = {
    "a tier's": TierFault("the block is not what its name says"),
    "any other": OSError("no space left"),
    "one that ends the thread": SystemExit("by a test"),
}
ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(params=FAULTS, ids=str)
def fault(request: pytest.FixtureRequest) -> BaseException:
    return FAULTS[request.param]


def word_of(fault: BaseException) -> str:
    return "thread has ended" if isinstance(fault, SystemExit) else str(fault)


@ends_a_thread
def test_a_file_that_cannot_be_read_is_one_result_with_an_error_and_is_gone(rig: Rig, fault: BaseException) -> None:
    rig.run(store(DISK, A, 3), store(DISK, B, 4))
    rig.files.read_fault = fault
    failed = load(DISK, A, 9)
    (error,) = rig.run(failed)
    assert word_of(fault) in error
    assert rig.block(9) == {10}
    rig.files.read_fault = None
    assert rig.run(load(DISK, B, 10)) == [""], "another thread reads on, if that one has ended"
    assert rig.files.dropped == [A]


@ends_a_thread
def test_a_file_that_cannot_be_written_is_one_result_with_an_error(rig: Rig, fault: BaseException) -> None:
    rig.files.write_fault = fault
    failed, kept = store(DISK, A, 3), store(HOST, A, 3)
    errors = rig.run(failed, kept)
    assert word_of(fault) in errors[0]
    assert errors[1] == ""
    rig.files.write_fault = None
    if isinstance(fault, SystemExit):
        assert "thread has ended" in rig.run(store(DISK, B, 4))[0]
    else:
        assert rig.run(store(DISK, B, 4)) == [""]
    assert A not in rig.files.files


@ends_a_thread
def test_a_copy_to_a_block_that_fails_is_one_result_with_an_error(make: Callable[..., Rig], fault: Any) -> None:
    rig = make(write_batch=4)
    rig.run(store(HOST, A, 3), store(HOST, B, 4), store(DISK, C, 5))
    rig.copier.write_fault = fault
    errors = rig.run(load(HOST, A, 9), load(HOST, B, 10), load(DISK, C, 11))
    assert all(word_of(fault) in error for error in errors)
    rig.copier.write_fault = None
    assert "the host tier has no such block" in rig.run(load(HOST, A, 9))[0]
    assert C not in rig.files.files


def test_a_copy_from_blocks_that_fails_is_an_error_of_each_store(rig: Rig) -> None:
    rig.copier.read_fault = OSError("the device is gone")
    stores = store(HOST, A, 3), store(DISK, A, 3), store(DISK, B, 4)
    assert rig.run(*stores) == ["OSError: the device is gone"] * 3
    rig.copier.read_fault = None
    assert rig.run(*(store(DISK, bytes([n]) * 16, 3) for n in range(QUEUED))) == [""] * QUEUED, "no place is lost"
    assert "no such block" in rig.run(load(HOST, A, 9))[0]


def test_a_removal_that_fails_costs_nothing_else(rig: Rig) -> None:
    rig.files.drop_fault = TierFault("a read-only disk")
    rig.run(store(DISK, A, 3), dropped=[(DISK, B)])
    rig.files.read_fault = TierFault("a bad sector")
    assert rig.run(load(DISK, A, 9)) == ["a bad sector"]
    rig.files.read_fault = None
    assert rig.run(load(DISK, A, 9), store(DISK, C, 4)) == ["", ""]


@ends_a_thread
def test_what_is_queued_behind_the_end_of_a_thread_has_its_results(rig: Rig) -> None:
    rig.files.writing.close()
    rig.files.write_fault = SystemExit("by a test")
    queued = rig.begin(*(store(DISK, bytes([number]) * 16, 3) for number in range(5)))
    rig.files.writing.open()
    assert rig.ends.errors(*queued) == ["the tier's thread has ended"] * 5
    assert rig.run(store(HOST, A, 3), store(DISK, A, 3))[0] == "", "the other tier goes on"


def test_moves_of_a_tier_that_there_is_not_fail() -> None:
    mover = TierMover(MemoryCopier(4), files=MemoryFiles())
    moves = load(HOST, A, 1), store(HOST, A, 2)
    ends = Ends(mover)
    mover.begin(moves)
    assert ends.errors(*moves) == ["the host tier has no such block", BUSY]
    mover.shutdown()


# --- a reset ---------------------------------------------------------------------------------------------------------


def test_a_reset_forgets_all_blocks_and_counts_them(rig: Rig) -> None:
    rig.run(store(HOST, A, 3), store(DISK, A, 3), store(DISK, B, 4))
    assert rig.mover.reset() == 3
    assert ["no" in error for error in rig.run(load(HOST, A, 9), load(DISK, A, 10))] == [True, True]
    assert [size.used_bytes for size in rig.mover.sizes()] == [0, 0]
    assert rig.run(store(HOST, A, 5), store(DISK, A, 5), load(HOST, A, 9)) == ["", "", ""]
    assert rig.block(9) == {6}


def test_loads_under_way_at_a_reset_end_with_an_error(rig: Rig) -> None:
    rig.run(store(HOST, A, 3), store(DISK, B, 4))
    rig.files.reading.close()
    loads = rig.begin(*(load(DISK, B, number) for number in range(9, 9 + READERS + 1)))
    rig.files.reading.wait_for_caller()
    rig.mover.reset()
    assert rig.ends.errors(*loads) == [FORGOTTEN] * len(loads)
    rig.files.reading.open()
    assert rig.run(store(DISK, A, 3), load(DISK, A, 15))[0] == ""
    assert rig.block(9) == {10}


def test_no_file_appears_after_a_reset(rig: Rig) -> None:
    """One is being written, and one waits: both are prompts that somebody wanted to be gone."""
    rig.files.writing.close()
    stores = rig.begin(store(DISK, A, 3), store(DISK, B, 4))
    rig.files.writing.wait_for_caller()
    rig.mover.reset()
    assert rig.ends.errors(stores[1]) == [FORGOTTEN], "which waits for no disk"
    rig.files.writing.open()
    assert rig.ends.errors(stores[0]) == [FORGOTTEN]
    assert rig.run(store(DISK, C, 5)) == [""]
    assert [*rig.files.files] == [C]


def test_a_reset_of_a_disk_that_refuses_it_forgets_the_rest_and_the_engine_goes_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.run(store(HOST, A, 3), store(DISK, A, 3))
    rig.files.drop_fault = TierFault("a read-only disk")
    assert rig.mover.reset() == 1
    assert "KV on disk could not be removed: a read-only disk" in caplog.text
    assert rig.run(store(HOST, A, 3)) == [""]


# --- what is told ----------------------------------------------------------------------------------------------------


def test_it_wakes_for_the_first_result_that_waits_and_for_changes(rig: Rig) -> None:
    rig.begin(store(HOST, A, 3))
    assert rig.ends.wakes == 1
    rig.begin(store(HOST, B, 4))
    assert rig.ends.wakes == 1, "nobody has taken the first"
    rig.mover.take_results()
    rig.begin(store(HOST, C, 5))
    assert rig.ends.wakes == 2
    rig.files.change(A, present=True)
    rig.files.change(A, present=False)
    assert rig.ends.wakes == 4
    assert rig.mover.take_changes() == [TierChange(DISK, A, True), TierChange(DISK, A, False)]
    assert rig.mover.take_changes() == []


def test_who_asks_to_be_woken_late_is_woken_for_what_is_there(rig: Rig) -> None:
    rig.begin(store(HOST, A, 3))
    late = Ends(rig.mover)
    assert late.wakes == 1
    assert [result.error for result in rig.mover.take_results()] == [""]
    assert Ends(rig.mover).wakes == 0


def test_sizes_are_what_tiers_hold_and_may_hold(rig: Rig) -> None:
    rig.run(store(HOST, A, 3), store(DISK, A, 3), store(DISK, B, 4))
    assert rig.mover.sizes() == (
        TierSize(HOST, 8 * BLOCK_BYTES, BLOCK_BYTES),
        TierSize(DISK, 2**30, 2 * BLOCK_BYTES),
    )


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_shutdown_writes_what_waits_for_the_disk_and_ends_all_threads(rig: Rig) -> None:
    rig.files.writing.close()
    rig.begin(store(DISK, A, 3), store(DISK, B, 4))
    rig.files.writing.wait_for_caller()
    thread = in_a_thread(rig.mover.shutdown)
    rig.files.writing.open()
    thread.join(TIMEOUT_S)
    assert {*rig.files.files} == {A, B}
    assert (rig.files.closed, rig.copier.closed) == (1, 1)
    rig.mover.shutdown()
    assert (rig.files.closed, rig.copier.closed) == (1, 1)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def test_a_shutdown_does_not_wait_for_a_disk_that_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "END_S", 0.05)
    rig.run(store(DISK, A, 3))
    rig.files.reading.close()
    rig.begin(load(DISK, A, 9))
    rig.files.reading.wait_for_caller()
    rig.mover.shutdown()
    assert (rig.files.closed, rig.copier.closed) == (0, 1)
    rig.files.reading.open()
    assert rig.mover._loads.join(time.monotonic() + TIMEOUT_S)
    assert rig.block(9) == {10}, "the read that came back wrote nothing"


# --- random lives ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _restless() -> Iterator[None]:
    """Let threads take turns every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
def test_in_random_lives_each_move_ends_once_and_each_load_has_its_digests_bytes(make: Callable[..., Rig]) -> None:
    """Blocks are stored, overwritten, dropped, loaded and given up, while threads and faults do as they like."""
    draw = random.Random(next_seed())
    rig = make(host_blocks=4, write_batch=3)
    begun: dict[int, BlockMove] = {}
    given_up: set[int] = set()
    owned = {number: {number + 1} for number in range(16)}
    """What nobody but this test writes to the blocks that no load has."""
    loading: dict[int, BlockMove] = {}
    ended: dict[int, str] = {}

    def take() -> None:
        for result in rig.mover.take_results():
            move = result.move
            assert move.move_id not in ended
            assert move.move_id not in given_up
            ended[move.move_id] = result.error
            if move.kind is MoveKind.LOAD:
                del loading[move.block_id]
                if not result.error:
                    assert rig.block(move.block_id) == {move.digest[0]}
                owned[move.block_id] = rig.block(move.block_id)

    for _ in range(4000):
        rig.files.read_fault = TierFault("drawn") if draw.random() < 0.1 else None
        rig.files.write_fault = TierFault("drawn") if draw.random() < 0.1 else None
        free = [number for number in range(16) if number not in loading]
        moves, dropped = [], []
        for number in draw.sample(free, min(len(free), draw.randint(0, 4))):
            value, tier = draw.randint(1, 9), draw.choice([HOST, DISK])
            if draw.random() < 0.5:
                rig.copier.blocks[number][:] = bytes([value]) * BLOCK_BYTES
                owned[number] = {value}
                moves += [store(one, bytes([value]) * 16, number) for one in {tier, draw.choice([HOST, DISK])}]
            else:
                moves.append(load(tier, bytes([value]) * 16, number))
                loading[number] = moves[-1]
        if draw.random() < 0.5:
            dropped.append((draw.choice([HOST, DISK]), bytes([draw.randint(1, 9)]) * 16))
        begun |= {move.move_id: move for move in moves}
        rig.begin(*moves, dropped=dropped)
        if loading and draw.random() < 0.3:
            number = draw.choice([*loading])
            move = loading[number]
            rig.mover.cancel([move.move_id])
            del loading[number]
            given_up.add(move.move_id)
            owned[number] = rig.block(number)
            rig.copier.blocks[number][:] = bytes([number + 1]) * BLOCK_BYTES
            owned[number] = {number + 1}
        if draw.random() < 0.7:
            take()
        for number in range(16):
            if number not in loading:
                assert rig.block(number) == owned[number]
    rest = [move for move_id, move in begun.items() if move_id not in ended and move_id not in given_up]
    results = rig.ends.of(*rest)
    assert sorted(result.move.move_id for result in results) == sorted(move.move_id for move in rest)
    assert not ended.keys() & given_up
    assert sum(not error for error in ended.values()) > 1000
