"""Owns stand-ins for what a mover of KV stands between: a device's blocks and a directory's files, both in memory.
Never waits for a time: a test holds what it wants to hold by events, and says which calls fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

from engine.kv_tiers import BlockMove, KvMover, MoveKind, MoveResult, Tier
from engine.tiers.faults import TierFault

TIMEOUT_S = 20.0
"""Only ever reached by a failure."""
BLOCK_BYTES = 64
_ids = count(1)


class Gate:
    """Holds calls between `close` and `open`. `entered` is set once a call is held."""

    def __init__(self) -> None:
        self._open, self.entered = threading.Event(), threading.Event()
        self._open.set()

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_for_caller(self) -> None:
        assert self.entered.wait(TIMEOUT_S), "nobody came to the gate"

    def pass_through(self) -> None:
        if not self._open.is_set():
            self.entered.set()
            assert self._open.wait(TIMEOUT_S), "the gate stayed closed"


class MemoryLanding:
    """A copy that is done when it is returned, unless the test closes the copier's `landing` gate."""

    def __init__(self, copier: MemoryCopier) -> None:
        self._copier = copier

    def wait(self) -> float:
        self._copier.landing.pass_through()
        return 0.0

    def hold(self) -> None:
        self._copier.held += 1


class MemoryCopier:
    """An engine.tiers.copier.BlockCopier of bytearrays."""

    def __init__(self, num_blocks: int, block_bytes: int = BLOCK_BYTES, write_batch: int = 1) -> None:
        self.block_bytes, self.write_batch = block_bytes, write_batch
        self.blocks = [bytearray(block_bytes) for _ in range(num_blocks)]
        self.free_rows = 10**6
        self.reading, self.writing, self.landing = Gate(), Gate(), Gate()
        self.read_fault: BaseException | None = None
        self.write_fault: BaseException | None = None
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self.log: list[str] = []
        """What happened, in order; tests add to it."""
        self.held = self.closed = 0

    def room(self) -> int:
        return self.free_rows

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> MemoryLanding:
        assert len(block_ids) <= self.free_rows
        self.reading.pass_through()
        if self.read_fault is not None:
            raise self.read_fault
        self.reads.append(tuple(block_ids))
        for block_id, row in zip(block_ids, into, strict=True):
            row[:] = self.blocks[block_id]
        return MemoryLanding(self)

    def fence(self) -> object:
        return len(self.reads)

    def write(self, block_ids: Sequence[int], rows: Sequence[memoryview], after: object) -> MemoryLanding:
        assert len(block_ids) <= self.write_batch
        self.writing.pass_through()
        if self.write_fault is not None:
            raise self.write_fault
        self.writes.append(tuple(block_ids))
        for block_id, row in zip(block_ids, rows, strict=True):
            self.blocks[block_id][:] = row
        self.log.append("wrote")
        return MemoryLanding(self)

    def close(self) -> None:
        self.closed += 1


class MemoryFiles:
    """An engine.tiers.copier.BlockFiles of a dict."""

    def __init__(self, capacity_bytes: int = 2**30) -> None:
        self.files: dict[bytes, bytes] = {}
        self.reading, self.writing = Gate(), Gate()
        self.read_fault: BaseException | None = None
        self.write_fault: BaseException | None = None
        self.drop_fault: BaseException | None = None
        self.dropped: list[bytes] = []
        self.closed = 0
        self._capacity = capacity_bytes
        self._changes: list[tuple[bytes, bool]] = []
        self._wake: Callable[[], None] | None = None

    def read(self, digest: bytes, into: memoryview) -> None:
        self.reading.pass_through()
        if self.read_fault is not None:
            raise self.read_fault
        if digest not in self.files:
            raise TierFault(f"there is no block {digest.hex()}")
        into[:] = self.files[digest]

    def write(self, digest: bytes, data: memoryview) -> int:
        self.writing.pass_through()
        if self.write_fault is not None:
            raise self.write_fault
        self.files[digest] = bytes(data)
        return len(data)

    def drop(self, digests: Sequence[bytes]) -> None:
        self.dropped += digests
        if self.drop_fault is not None:
            raise self.drop_fault
        for digest in digests:
            self.files.pop(digest, None)

    def change(self, digest: bytes, *, present: bool) -> None:
        """Pretend that another engine has added or removed a block."""
        self._changes.append((digest, present))
        if self._wake is not None:
            self._wake()

    def take_changes(self) -> list[tuple[bytes, bool]]:
        taken, self._changes = self._changes, []
        return taken

    def sizes(self) -> tuple[int, int]:
        return self._capacity, sum(map(len, self.files.values()))

    def reset(self) -> int:
        if self.drop_fault is not None:
            raise self.drop_fault
        number = len(self.files)
        self.files.clear()
        return number

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        self.closed += 1


def store(tier: Tier, digest: bytes, block_id: int) -> BlockMove:
    return BlockMove(next(_ids), MoveKind.STORE, tier, digest, block_id)


def load(tier: Tier, digest: bytes, block_id: int) -> BlockMove:
    return BlockMove(next(_ids), MoveKind.LOAD, tier, digest, block_id)


class Ends:
    """Waits for the results of a mover's moves."""

    def __init__(self, mover: KvMover) -> None:
        self._mover, self._woken = mover, threading.Event()
        self.wakes = 0
        mover.on_result(self._wake)

    def _wake(self) -> None:
        self.wakes += 1
        self._woken.set()

    def of(self, *moves: BlockMove) -> list[MoveResult]:
        """Return the results of all that ends until these moves have ended, in the order in which it ended."""
        missing, found = {move.move_id for move in moves}, list[MoveResult]()
        while missing:
            self._woken.clear()
            taken = self._mover.take_results()
            found += taken
            missing -= {result.move.move_id for result in taken}
            if missing:
                assert taken or self._woken.wait(TIMEOUT_S), f"moves without a result: {sorted(missing)}"
        return found

    def errors(self, *moves: BlockMove) -> list[str]:
        """Run to the ends of these moves, which nothing else ends beside; return their errors in their order."""
        ended = {result.move: result for result in self.of(*moves)}
        assert len(ended) == len(moves)
        return [ended[move].error for move in moves]
