"""Owns loads: threads that copy rows and files to blocks, and the promise that a cancelled one writes no more.
Never waits for a disk on the step thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition

from engine.kv_tiers import BlockMove, MoveResult, Tier
from engine.tiers.copier import BlockCopier, BlockFiles, Landing
from engine.tiers.faults import TierFault
from engine.tiers.host_pool import HostPool
from engine.tiers.results import Results
from engine.tiers.worker import Worker

logger = logging.getLogger(__name__)

READERS = 2
"""Threads that read files: while one checks a file, or waits for a bad sector, the other reads on."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load from `begin` until its thread is done with it."""

    move: BlockMove
    after: object
    """See BlockCopier.fence."""
    row: int | None
    """The host tier's row, which the load holds."""
    writing: bool = False
    """Whether the block may be written to at any moment."""
    landing: Landing | None = None
    """The copy to the block, once it was started."""
    cancelled: bool = False
    ended: bool = False


class Loads:
    """The loads of one engine. Only the step thread calls it."""

    def __init__(self, copier: BlockCopier, pool: HostPool, files: BlockFiles | None, results: Results) -> None:
        """pool: has READERS rows to spare, if there are files."""
        self._copier, self._pool, self._files, self._results = copier, pool, files, results
        self._live: dict[int, _Load] = {}
        self._changed = Condition()
        self._workers: dict[Tier, Worker[_Load]] = {}
        if pool.num_blocks:
            batch = copier.write_batch
            self._workers[Tier.HOST] = Worker("kv-loader", self._from_host, self._fail, batch=batch)
        if files is not None:
            self._read_into: SimpleQueue[int] = SimpleQueue()
            for _ in range(READERS):
                row = pool.take()
                assert row is not None, "the pool has no row for a reader"
                self._read_into.put(row)
            self._workers[Tier.DISK] = Worker("kv-reader", self._from_disk, self._fail, threads=READERS)

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Start loads. They write to their blocks once the device is past all steps that were launched."""
        after = self._copier.fence()
        for move in moves:
            worker = self._workers.get(move.tier)
            row = self._pool.find(move.digest) if move.tier is Tier.HOST else None
            if worker is None or (move.tier is Tier.HOST and row is None):
                self._results.put([MoveResult(move, f"the {move.tier} tier has no such block")])
                continue
            load = _Load(move, after, row)
            with self._changed:
                self._live[move.move_id] = load
            worker.submit(move.move_id, load)

    def cancel(self, move_ids: Sequence[int]) -> list[BlockMove]:
        """End loads without a result, and return their moves. When it returns, their blocks are not written to any
        more; on a GPU, not by the time that any later step runs."""
        with self._changed:
            loads = [load for move_id in move_ids if (load := self._live.pop(move_id, None)) is not None]
            for load in loads:
                load.cancelled = True
        for load in loads:
            if self._workers[load.move.tier].take_back(load.move.move_id) is not None:
                self._end(load)
            else:
                self._stop_writing(load)
        return [load.move for load in loads]

    def forget(self, error: str) -> None:
        """End all loads that are under way with an error."""
        self._results.put(MoveResult(move, error) for move in self.cancel(self._ids()))

    def close(self) -> None:
        """Give up all loads, and take no more."""
        self.cancel(self._ids())
        for worker in self._workers.values():
            worker.close()

    def join(self, deadline_s: float) -> bool:
        """See Worker.join."""
        ended = [worker.join(deadline_s) for worker in self._workers.values()]
        return all(ended)

    def _ids(self) -> list[int]:
        with self._changed:
            return [*self._live]

    def _stop_writing(self, load: _Load) -> None:
        """Return when a cancelled load writes no more. A copy takes no longer than memory does: only files may hang."""
        with self._changed:
            self._changed.wait_for(lambda: load.landing is not None or not load.writing)
            landing = load.landing
        if landing is not None:
            landing.hold()

    # --- the threads --------------------------------------------------------------------------------------------------

    def _from_host(self, loads: list[_Load]) -> None:
        rows = [self._pool.view(load.row) for load in loads if load.row is not None]
        self._write(loads, rows, time.perf_counter())

    def _from_disk(self, loads: list[_Load]) -> None:
        assert self._files is not None
        row = self._read_into.get()
        try:
            view = self._pool.view(row)
            for load in loads:
                began = time.perf_counter()
                try:
                    self._files.read(load.move.digest, view)
                except TierFault as fault:
                    self._fail([load], str(fault))
                else:
                    self._write([load], [view], began)
        finally:
            self._read_into.put(row)

    def _write(self, loads: Sequence[_Load], rows: Sequence[memoryview], began: float) -> None:
        """Copy rows to the blocks of those loads that were not cancelled, and end all."""
        with self._changed:
            live = [(load, row) for load, row in zip(loads, rows, strict=True) if not load.cancelled]
            for load, _ in live:
                load.writing = True
        waited_s = 0.0
        if live:
            block_ids = [load.move.block_id for load, _ in live]
            landing = self._copier.write(block_ids, [row for _, row in live], live[-1][0].after)
            with self._changed:
                for load, _ in live:
                    load.landing = landing
                self._changed.notify_all()
            waited_s = landing.wait()
        seconds = (time.perf_counter() - began - waited_s) / max(1, len(live))
        for load in loads:
            self._end(load, MoveResult(load.move, "", seconds, self._copier.block_bytes))

    def _fail(self, loads: Sequence[_Load], error: str) -> None:
        """End loads that failed. A tier that has failed to give a block back no longer has it."""
        for load in loads:
            if load.ended:
                continue
            if not load.cancelled:
                self._drop(load.move)
            self._end(load, MoveResult(load.move, error))

    def _drop(self, move: BlockMove) -> None:
        if move.tier is Tier.HOST:
            self._pool.drop(move.digest)
        elif self._files is not None:
            try:
                self._files.drop([move.digest])
            except TierFault as fault:
                logger.warning("a block that could not be read could not be removed, either: %s", fault)

    def _end(self, load: _Load, result: MoveResult | None = None) -> None:
        with self._changed:
            if load.ended:
                return
            load.ended, load.writing = True, False
            self._live.pop(load.move.move_id, None)
            row, load.row = load.row, None
            self._changed.notify_all()
            if row is not None:
                self._pool.release(row)
            # Within the lock: after a cancel there must be no result.
            told = [] if result is None or load.cancelled else [result]
            wake = self._results.add(told)
        wake()
