"""Owns stores: blocks are copied to rows at once, and a thread writes files from the rows.
Never touches the device after `begin`, and never lets files pile up in memory: a disk that is behind is busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock

from engine.kv_tiers import BUSY, BlockMove, MoveResult, Tier
from engine.tiers.copier import BlockCopier, BlockFiles, Landing
from engine.tiers.faults import TierFault
from engine.tiers.host_pool import HostPool
from engine.tiers.results import Results
from engine.tiers.worker import Worker

logger = logging.getLogger(__name__)

FORGOTTEN = "all tiers were reset"
"""The error of a move that was under way at a reset."""
QUEUED_BYTES = 64 * 2**20
"""Memory for blocks that wait for the disk: about what a disk writes while a step of a large prompt is computed."""
FEWEST_QUEUED, MOST_QUEUED = 8, 128


def queued_writes(block_bytes: int) -> int:
    """Return how many blocks may wait for the disk."""
    return max(FEWEST_QUEUED, min(MOST_QUEUED, QUEUED_BYTES // block_bytes))


@dataclass(slots=True, eq=False)
class _Store:
    """A block that goes to one tier or both by one copy, and the row that it goes to."""

    row: int
    moves: list[BlockMove]


@dataclass(slots=True, eq=False)
class _Write:
    """A file to be written. It holds its row, and a place in the queue."""

    move: BlockMove
    row: int
    landing: Landing
    generation: int
    """If this is not the current one, the file must not be there afterwards."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Drop:
    digests: tuple[bytes, ...]


class Stores:
    """The stores of one engine. Only the step thread calls it."""

    def __init__(
        self, copier: BlockCopier, pool: HostPool, files: BlockFiles | None, results: Results, *, queued: int
    ) -> None:
        """queued: how many blocks may wait for the disk."""
        self._copier, self._pool, self._files, self._results = copier, pool, files, results
        self._lock, self._keys = Lock(), count()
        self._places, self._generation = queued, 0
        self._writer = None if files is None else Worker[_Write | _Drop]("kv-writer", self._run, self._fail)

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Copy the blocks of stores, and queue their files."""
        stores, ended, room = list[_Store](), list[MoveResult](), self._copier.room()
        for together in _by_block(moves):
            store = self._admit(together, ended, has_room=len(stores) < room)
            if store is not None:
                stores.append(store)
        self._results.put(ended)
        if stores:
            self._copy(stores)

    def drop_files(self, digests: Sequence[bytes]) -> None:
        """Remove files, once those that were queued before are written."""
        if self._writer is not None and digests:
            self._writer.submit(next(self._keys), _Drop(tuple(digests)))

    def forget(self) -> None:
        """End the stores that are under way with an error, and leave no file of theirs. Then reset the files."""
        with self._lock:
            self._generation += 1
        if self._writer is not None:
            self._fail(self._writer.take_all_back(), FORGOTTEN)

    def close(self) -> None:
        """Take no further stores. Files that are queued are still written."""
        if self._writer is not None:
            self._writer.close()

    def join(self, deadline_s: float) -> bool:
        """See Worker.join."""
        return self._writer is None or self._writer.join(deadline_s)

    # --- the step thread ----------------------------------------------------------------------------------------------

    def _admit(self, moves: Sequence[BlockMove], ended: list[MoveResult], *, has_room: bool) -> _Store | None:
        """Return the store of one block's moves, without those that end here: they are added to `ended`."""
        wanted = []
        for move in moves:
            if move.tier is Tier.HOST and self._pool.has(move.digest):
                ended.append(MoveResult(move))
            else:
                wanted.append(move)
        row = self._pool.take() if wanted and has_room else None
        admitted = [] if row is None else [move for move in wanted if self._keep_place(move, row)]
        ended += [MoveResult(move, BUSY) for move in wanted if move not in admitted]
        if row is not None and not admitted:
            self._pool.release(row)
        return _Store(row, admitted) if row is not None and admitted else None

    def _keep_place(self, move: BlockMove, row: int) -> bool:
        """Return whether the move's tier has room for it: a name, or a place in the queue."""
        if move.tier is Tier.HOST:
            return self._pool.name(row, move.digest)
        with self._lock:
            if self._files is None or not self._places:
                return False
            self._places -= 1
            return True

    def _copy(self, stores: Sequence[_Store]) -> None:
        began = time.perf_counter()
        block_ids = [store.moves[0].block_id for store in stores]
        try:
            landing = self._copier.read(block_ids, [self._pool.view(store.row) for store in stores])
        except Exception as error:
            logger.exception("blocks could not be copied to lower tiers")
            self._give_up(stores, f"{type(error).__name__}: {error}")
            return
        seconds = (time.perf_counter() - began) / len(stores)
        for store in stores:
            on_disk = [move for move in store.moves if move.tier is Tier.DISK]
            self._results.put(
                MoveResult(move, "", seconds, self._copier.block_bytes)
                for move in store.moves
                if move.tier is Tier.HOST
            )
            if not on_disk:
                self._pool.release(store.row)
            elif self._writer is not None:
                (move,) = on_disk
                self._writer.submit(next(self._keys), _Write(move, store.row, landing, self._generation))

    def _give_up(self, stores: Sequence[_Store], error: str) -> None:
        """End stores whose blocks were not copied."""
        for store in stores:
            for move in store.moves:
                if move.tier is Tier.HOST:
                    self._pool.drop(move.digest)
                else:
                    self._return_place()
            self._pool.release(store.row)
        self._results.put(MoveResult(move, error) for store in stores for move in store.moves)

    def _return_place(self) -> None:
        with self._lock:
            self._places += 1

    # --- the writer's thread ------------------------------------------------------------------------------------------

    def _run(self, jobs: list[_Write | _Drop]) -> None:
        assert self._files is not None
        for job in jobs:
            if isinstance(job, _Drop):
                self._files.drop(job.digests)
            else:
                self._write(self._files, job)

    def _write(self, files: BlockFiles, job: _Write) -> None:
        job.landing.wait()
        began = time.perf_counter()
        try:
            size = files.write(job.move.digest, self._pool.view(job.row))
        except TierFault as fault:
            self._end(job, MoveResult(job.move, str(fault)))
            return
        seconds = time.perf_counter() - began
        if job.generation == self._generation:
            self._end(job, MoveResult(job.move, "", seconds, size))
            return
        files.drop([job.move.digest])
        self._end(job, MoveResult(job.move, FORGOTTEN))

    def _fail(self, jobs: Sequence[_Write | _Drop], error: str) -> None:
        for job in jobs:
            if isinstance(job, _Write):
                self._end(job, MoveResult(job.move, error))

    def _end(self, job: _Write, result: MoveResult) -> None:
        with self._lock:
            if job.ended:
                return
            job.ended = True
            self._places += 1
        self._pool.release(job.row)
        self._results.put([result])


def _by_block(moves: Sequence[BlockMove]) -> list[list[BlockMove]]:
    """Return the moves of one block's content to different tiers together."""
    together: dict[tuple[bytes, int], list[list[BlockMove]]] = {}
    groups = []
    for move in moves:
        known = together.setdefault((move.digest, move.block_id), [])
        group = next((group for group in known if all(other.tier is not move.tier for other in group)), None)
        if group is None:
            group = []
            known.append(group)
            groups.append(group)
        group.append(move)
    return groups
