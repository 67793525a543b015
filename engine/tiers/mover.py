"""Owns the mover of an engine's KV (engine.kv_tiers.KvMover): a host tier, a disk tier, or both.
Never decides what moves, and never waits for a disk on the step thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.kv_tiers import BlockMove, MoveKind, MoveResult, Tier, TierChange, TierSize
from engine.tiers.copier import BlockCopier, BlockFiles
from engine.tiers.faults import TierFault
from engine.tiers.host_pool import HostPool, Pin
from engine.tiers.loads import READERS, Loads
from engine.tiers.results import Results
from engine.tiers.stores import FORGOTTEN, Stores, queued_writes

logger = logging.getLogger(__name__)

END_S = 2.0
"""How long a shutdown waits for files that are being read and written, in seconds."""


def spare_rows(block_bytes: int, *, disk: bool) -> int:
    """Return how many rows of memory a mover takes besides the host tier's blocks: for blocks on their way to and from
    a disk."""
    return queued_writes(block_bytes) + READERS if disk else 0


class TierMover:
    """Moves blocks between a copier's device, rows of memory and files. It takes over all three."""

    def __init__(
        self,
        copier: BlockCopier,
        *,
        host_blocks: int = 0,
        files: BlockFiles | None = None,
        pin: Pin | None = None,
    ) -> None:
        """host_blocks: how many blocks the host tier holds; 0: there is none. files: the disk tier. pin: makes the
        memory known to the device."""
        size = copier.block_bytes
        self._pool = HostPool(host_blocks, spare_rows(size, disk=files is not None), size, pin)
        self._copier, self._files, self._results = copier, files, Results()
        self._stores = Stores(copier, self._pool, files, self._results, queued=queued_writes(size))
        self._loads = Loads(copier, self._pool, files, self._results)
        self._ended = False

    @property
    def tiers(self) -> tuple[Tier, ...]:
        there = {Tier.HOST: self.host_blocks > 0, Tier.DISK: self._files is not None}
        return tuple(tier for tier, is_there in there.items() if is_there)

    @property
    def host_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._copier.block_bytes

    def begin(self, moves: Sequence[BlockMove], dropped: Sequence[tuple[Tier, bytes]] = ()) -> None:
        for tier, digest in dropped:
            if tier is Tier.HOST:
                self._pool.drop(digest)
        self._stores.drop_files([digest for tier, digest in dropped if tier is Tier.DISK])
        stores = [move for move in moves if move.kind is MoveKind.STORE]
        if stores:
            self._stores.begin(stores)
        # A load may go to the block of one of the stores, which was read by now.
        loads = [move for move in moves if move.kind is MoveKind.LOAD]
        if loads:
            self._loads.begin(loads)

    def cancel(self, move_ids: Sequence[int]) -> None:
        self._loads.cancel(move_ids)
        self._results.remove_loads({*move_ids})

    def take_results(self) -> list[MoveResult]:
        return self._results.take()

    def take_changes(self) -> list[TierChange]:
        if self._files is None:
            return []
        return [TierChange(Tier.DISK, digest, present) for digest, present in self._files.take_changes()]

    def sizes(self) -> tuple[TierSize, ...]:
        size, sizes = self.block_bytes, []
        if self.host_blocks:
            sizes.append(TierSize(Tier.HOST, self.host_blocks * size, self._pool.num_named * size))
        if self._files is not None:
            sizes.append(TierSize(Tier.DISK, *self._files.sizes()))
        return tuple(sizes)

    def reset(self) -> int:
        """See KvMover. A directory that cannot be written is not used any more, which is logged."""
        self._loads.forget(FORGOTTEN)
        self._stores.forget()
        return self._pool.reset() + (0 if self._files is None else _removed(self._files))

    def on_result(self, wake: Callable[[], None]) -> None:
        self._results.on_put(wake)
        if self._files is not None:
            self._files.on_change(wake)

    def shutdown(self) -> None:
        """End threads and files. Blocks that wait for the disk are written, if that takes no longer than END_S. A
        second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self._loads.close()
        self._stores.close()
        deadline_s = time.monotonic() + END_S
        ended = self._stores.join(deadline_s)
        ended &= self._loads.join(deadline_s)
        if self._files is not None and ended:
            self._files.close()
        elif self._files is not None:  # closing it might hang, too
            logger.warning("the disk tier does not answer: its files are left open")
        self._copier.close()
        self._pool.close()


def _removed(files: BlockFiles) -> int:
    """Remove all files; return how many."""
    try:
        return files.reset()
    except TierFault as fault:  # the engine goes on without them
        logger.error("KV on disk could not be removed: %s", fault)
        return 0
