"""Owns the tiers of the scripted executor: its KV slots, copied block by block, with scripted delays and faults.
Never needs a thread or a disk: a "disk" is memory that a test may share between two engines."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from engine.kv_tiers import BUSY, BlockMove, MoveKind, MoveResult, Tier, TierChange, TierSize

BLOCK_BYTES = 4096
"""Assumed size of a block."""


class FakeMover:
    """A KvMover over the slots of a FakeExecutor. A step's stores read their blocks at once; moves end at once, too, or
    if they are `held`, when `release` lets them."""

    def __init__(
        self,
        slots: MutableSequence[Any],
        block_size: int,
        *,
        host_blocks: int = 0,
        disk: dict[bytes, list[Any]] | None = None,
        held: bool = False,
        move_s: float = 1e-6,
        most_storing: int = 1 << 30,
        failing: Callable[[BlockMove], str | None] = lambda move: None,
    ) -> None:
        """slots: the device's, block by block. disk: what the directory holds; None: there is none. held: moves end
        only when `release` is called. move_s: how long a block is said to have taken. most_storing: stores that may be
        under way. failing: says why a move fails."""
        self._slots = slots
        self._block_size = block_size
        self._host_blocks = host_blocks
        self._kept: dict[Tier, dict[bytes, list[Any]]] = {}
        if host_blocks:
            self._kept[Tier.HOST] = {}
        if disk is not None:
            self._kept[Tier.DISK] = disk
        self._held = held
        self._move_s = move_s
        self._most_storing = most_storing
        self._failing = failing
        self._under_way: dict[int, tuple[BlockMove, list[Any]]] = {}
        self._results: list[MoveResult] = []
        self._changes = [TierChange(Tier.DISK, digest, True) for digest in disk or ()]
        self._wake: Callable[[], None] = lambda: None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self._kept)

    @property
    def host_blocks(self) -> int:
        return self._host_blocks

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def begin(self, moves: Sequence[BlockMove], dropped: Sequence[tuple[Tier, bytes]] = ()) -> None:
        for tier, digest in dropped:
            del self._kept[tier][digest]  # KeyError: the core drops what is not there
        for move in moves:
            storing = sum(other.kind is MoveKind.STORE for other, _ in self._under_way.values())
            if move.kind is MoveKind.STORE and storing >= self._most_storing:
                self._results.append(MoveResult(move, BUSY))
                continue
            self._under_way[move.move_id] = move, self._block(move) if move.kind is MoveKind.STORE else []
        if not self._held:
            self.release(len(self._under_way))
        self._tell()

    def release(self, count: int) -> None:
        """Let up to `count` moves end, the oldest first."""
        for move_id in list(self._under_way)[:count]:
            self._end(*self._under_way.pop(move_id))
        self._tell()

    def _tell(self) -> None:
        """Wake the core, but only if there is something to take, as movers with threads do."""
        if self._results or self._changes:
            self._wake()

    def _end(self, move: BlockMove, stored: list[Any]) -> None:
        error = self._failing(move) or ""
        kept = self._kept[move.tier]
        if move.kind is MoveKind.STORE:
            if not error:
                kept[move.digest] = stored
        elif error or move.digest not in kept:
            error = error or "the tier has lost the block"
            kept.pop(move.digest, None)
            self._write(move, [None] * self._block_size)
        else:
            self._write(move, kept[move.digest])
        self._results.append(MoveResult(move, error, 0.0 if error else self._move_s, 0 if error else BLOCK_BYTES))

    def _block(self, move: BlockMove) -> list[Any]:
        start = move.block_id * self._block_size
        return list(self._slots[start : start + self._block_size])

    def _write(self, move: BlockMove, content: Sequence[Any]) -> None:
        for offset, slot in enumerate(content):
            self._slots[move.block_id * self._block_size + offset] = slot

    def lose(self, tier: Tier, digest: bytes) -> None:
        """Another engine, or the disk's bound, removes a block; the core is told with the next changes."""
        self._kept[tier].pop(digest, None)
        self._changes.append(TierChange(tier, digest, present=False))
        self._tell()

    def cancel(self, move_ids: Sequence[int]) -> None:
        for move_id in move_ids:
            self._under_way.pop(move_id, None)

    def take_results(self) -> list[MoveResult]:
        taken, self._results = self._results, []
        return taken

    def take_changes(self) -> list[TierChange]:
        taken, self._changes = self._changes, []
        return taken

    def sizes(self) -> tuple[TierSize, ...]:
        used = {tier: len(kept) * BLOCK_BYTES for tier, kept in self._kept.items()}
        host = self._host_blocks * BLOCK_BYTES
        return tuple(TierSize(tier, host if tier is Tier.HOST else 1 << 40, used[tier]) for tier in self._kept)

    def reset(self) -> int:
        dropped = sum(len(kept) for kept in self._kept.values())
        for kept in self._kept.values():
            kept.clear()
        stores = [move_id for move_id, (move, _) in self._under_way.items() if move.kind is MoveKind.STORE]
        self.cancel(stores)
        return dropped

    def on_result(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def shutdown(self) -> None:
        self._under_way.clear()
