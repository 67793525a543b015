"""Owns what is known of the tiers below the device: which blocks they hold, which are to be stored, and what moves.
Never copies or waits: its moves are collected for the next step's plan, and it is told how they ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, takewhile
from typing import NamedTuple

from engine.config import ResolvedConfig
from engine.kv_tiers import BUSY, BlockMove, KvMover, MoveKind, MoveResult, Tier, TierChange, TierLoad, TierSize
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.by_value import ByValue
from engine.scheduling.request import Request
from engine.scheduling.retention import BlockFacts, LeastRecent, Retention
from engine.scheduling.tier_rates import TierRates

RETENTIONS: Mapping[str, type[ByValue] | type[LeastRecent]] = {"value": ByValue, "lru": LeastRecent}
UNKNOWN = BlockFacts(0)
"""What is known of a block that another engine stored."""
LOAD_SHARE = 0.25
"""Loads beside a step may take this share of its time: 500 at once stretched a step of 15 ms to 300 ms on two cores."""
LEAST_LOADING, MOST_LOADING = 4, 64
"""Loads that may be under way in any case, and if nothing else runs."""
LEAST_BLOCK_S = 1e-4
"""What the load of a block is taken to last at least, where nothing was measured yet."""


class PlannedStore(NamedTuple):
    tier: Tier
    digest: bytes
    block_id: int


class Moves(NamedTuple):
    """What a step hands to the KvMover."""

    moves: tuple[BlockMove, ...] = ()
    drops: tuple[tuple[Tier, bytes], ...] = ()
    cancelled: tuple[int, ...] = ()
    """Loads that must have ended before a row of the step writes."""


class _UnderWay(NamedTuple):
    """A load that the mover has."""

    move: BlockMove
    since: float


@dataclass(slots=True)
class _Known:
    """One tier."""

    totals: TierLoad
    """What it has done; what it holds is filled in when somebody asks."""
    has: dict[bytes, BlockFacts] = field(default_factory=dict)
    """In the order in which they were stored or used."""
    dirty: OrderedDict[bytes, BlockFacts] = field(default_factory=OrderedDict)
    """Published blocks that the tier lacks, in the order in which they were published."""
    storing: dict[bytes, BlockFacts] = field(default_factory=dict)
    is_busy: bool = False
    """Whether the tier refused a store, and has not taken one since."""

    def lacks(self, digest: bytes) -> bool:
        return digest not in self.has and digest not in self.storing


class TierIndex:
    """The tiers of one engine. A plan only looks; `begin_store`, `begin_load` and what follows are called when it is
    committed, or between steps."""

    def __init__(self, config: ResolvedConfig, mover: KvMover) -> None:
        self.epoch = 0
        """Changes whenever `nearest` could return something else."""
        self.rates = TierRates()
        self._known = {tier: _Known(TierLoad(tier)) for tier in mover.tiers}
        self._host_blocks = mover.host_blocks
        self._kept: Retention = RETENTIONS[config.kv_tiers.retention]()
        self._most_stores = config.max_num_batched_tokens // config.block_size + 1  # as fast as steps publish
        self._most_dirty = config.num_kv_blocks
        self._num_moves = 0
        self._now = 0.0  # of the last commit
        self._moves: list[BlockMove] = []
        self._queued: OrderedDict[int, BlockMove] = OrderedDict()  # loads that are not under way yet
        self._under_way: dict[int, _UnderWay] = {}  # loads that the mover has
        self._drops: list[tuple[Tier, bytes]] = []
        self._cancelled: list[int] = []
        self._held: set[bytes] = set()  # by loads, in the host tier

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self._known)

    def nearest(self, digest: bytes) -> Tier | None:
        """Return the nearest tier that has a block; None if none has."""
        return next((tier for tier, known in self._known.items() if digest in known.has), None)

    def loads(self, sizes: Iterable[TierSize]) -> tuple[TierLoad, ...]:
        """Return the state of each tier for LoadSnapshot."""
        return tuple(
            replace(known.totals, num_blocks=len(known.has), capacity_bytes=capacity, used_bytes=used)
            for tier, capacity, used in sizes
            for known in (self._known[tier],)
        )

    def digests(self, limit: int) -> dict[Tier, list[bytes]]:
        """Return up to `limit` digests of blocks in each tier that are in no nearer one: those stored or used last, a
        prefix's head before its tail."""
        return {
            tier: [digest for digest in islice(reversed(known.has), limit) if self.nearest(digest) is tier][::-1]
            for tier, known in self._known.items()
        }

    # --- what requests do with blocks -----------------------------------------------------------------------------

    def lacks(self, digest: bytes) -> bool:
        """Whether a tier lacks a block that is not on its way there."""
        return any(known.lacks(digest) and digest not in known.dirty for known in self._known.values())

    def published(self, digest: bytes, facts: BlockFacts) -> None:
        """The device has a block that a tier lacks."""
        for known in self._known.values():
            if known.lacks(digest):
                known.dirty[digest] = facts
                if len(known.dirty) > self._most_dirty:
                    known.dirty.popitem(last=False)

    def used(self, digests: Sequence[bytes], now: float) -> None:
        """A request begins with these blocks, which it found, wherever."""
        self._kept.use(digests, now)
        for digest in digests:
            for known in self._known.values():
                if (facts := known.has.pop(digest, None)) is not None:
                    known.has[digest] = facts  # the last one

    def end_turn(self, request: Request, num_blocks: int) -> None:
        """A request ends whose first blocks, so many, are computed."""
        self._kept.end_turn(request.session, request.block_hashes[:num_blocks], self._now)

    # --- stores ---------------------------------------------------------------------------------------------------

    @property
    def has_stores(self) -> bool:
        """Whether a plan without rows would have stores, as far as tiers take them now."""
        return any(known.dirty and self._room(tier) > 0 for tier, known in self._known.items())

    @property
    def is_storing(self) -> bool:
        return any(known.storing for known in self._known.values())

    def _room(self, tier: Tier) -> int:
        """Return how many blocks a tier takes now."""
        known = self._known[tier]
        if known.is_busy and known.storing:
            return 0
        if tier is not Tier.HOST:
            return self._most_stores
        return min(self._most_stores, self._host_blocks - len(known.storing))

    def stores(self, blocks: BlockManager, hasty: Iterable[bytes] = ()) -> tuple[PlannedStore, ...]:
        """Return what to store in a step. `hasty`: blocks that the step may overwrite, which go to the host first, as
        many as there are. Takes O(stores + blocks that the KV cache has lost)."""
        found: list[PlannedStore] = []
        for tier, known in self._known.items():
            first = [digest for digest in hasty if digest in known.dirty] if tier is Tier.HOST else []
            room = max(self._room(tier), min(len(first), self._host_blocks - len(known.storing)))
            chosen: dict[bytes, None] = {}
            for digest in chain(first, known.dirty):
                if len(chosen) >= room:
                    break
                if (block_id := blocks.block_of(digest)) is not None and digest not in chosen:
                    chosen[digest] = None
                    found.append(PlannedStore(tier, digest, block_id))
        return tuple(found)

    def begin_stores(
        self, stores: Sequence[PlannedStore], blocks: BlockManager, now: float, wanted: Iterable[bytes] = ()
    ) -> None:
        """Begin a plan's stores. `wanted`: blocks that the plan loads, which are not evicted for others."""
        self._now = now
        held = [digest for digest in wanted if digest in self._kept]
        for digest in held:
            self._kept.hold(digest)
        for store in stores:
            self._begin_store(store, now)
        self.forget_lost(blocks)
        for digest in held:
            self._kept.release(digest)

    def forget_lost(self, blocks: BlockManager) -> None:
        """Forget blocks that were to be stored and that the KV cache has lost, up to the first that it has."""
        for known in self._known.values():
            while known.dirty and blocks.block_of(next(iter(known.dirty))) is None:
                known.dirty.popitem(last=False)

    def _begin_store(self, store: PlannedStore, now: float) -> None:
        known = self._known[store.tier]
        facts = known.dirty.pop(store.digest)
        if store.tier is Tier.HOST and not self._make_room(store.digest, facts, now):
            return
        known.storing[store.digest] = facts
        self._moves.append(self._next_move(MoveKind.STORE, *store))

    def _make_room(self, digest: bytes, facts: BlockFacts, now: float) -> bool:
        """Evict a block of the host tier if it is full. Returns False if the new one is worth the least of all, or none
        may be evicted."""
        known = self._known[Tier.HOST]
        if len(known.has) + len(known.storing) < self._host_blocks:
            return True
        victim = self._kept.pop_victim_for(digest, facts, now)
        if victim is None or victim == digest:
            return False
        del known.has[victim]
        known.totals.evicted_blocks += 1
        self._drops.append((Tier.HOST, victim))
        self.epoch += 1
        return True

    # --- loads ----------------------------------------------------------------------------------------------------

    def begin_load(self, digest: bytes, tier: Tier, block_id: int) -> BlockMove:
        """Load a block from a tier that has it into a held block of the device."""
        if tier is Tier.HOST:
            self._kept.hold(digest)
            self._held.add(digest)
        move = self._next_move(MoveKind.LOAD, tier, digest, block_id)
        self._queued[move.move_id] = move
        return move

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def _begin_queued(self, *, beside_rows: bool) -> None:
        """Hand loads to the mover: as many as take a share of a step's time, if requests run."""
        left_s, most = self.rates.step_s * LOAD_SHARE, MOST_LOADING
        if beside_rows:
            begun = (load.move for load in self._under_way.values())
            each = map(self._load_s, chain(begun, self._queued.values()))
            most = max(LEAST_LOADING, sum(1 for _ in takewhile(lambda spent: spent <= left_s, accumulate(each))))
        while self._queued and len(self._under_way) < most:
            move_id, move = self._queued.popitem(last=False)
            self._under_way[move_id] = _UnderWay(move, self._now)
            self._moves.append(move)

    def _load_s(self, move: BlockMove) -> float:
        return max(self.rates.move_s(MoveKind.LOAD, move.tier, self._now), LEAST_BLOCK_S)

    def begun_at(self, move_ids: Iterable[int]) -> float | None:
        """Return when the mover got the first of these loads that it still has; None if it has none."""
        return min((self._under_way[move_id].since for move_id in move_ids if move_id in self._under_way), default=None)

    def cancel_load(self, move: BlockMove) -> None:
        self._let_go(move.digest)
        self.epoch += 1  # it is no longer coming
        if self._queued.pop(move.move_id, None) is None:
            del self._under_way[move.move_id]
            self._cancelled.append(move.move_id)

    def _let_go(self, digest: bytes) -> None:
        """A load of a block has ended, which kept it from being evicted."""
        if digest in self._held:
            self._held.remove(digest)
            self._kept.release(digest)

    def note_late(self, num_blocks: Mapping[Tier, int], waited_s: float, now: float) -> None:
        """A request is computed after all: so many of its blocks did not come from these tiers within `waited_s`."""
        for tier, count in num_blocks.items():
            self._known[tier].totals.late_loads += 1
            self.rates.note_late(tier, waited_s / count, now)

    def _next_move(self, kind: MoveKind, tier: Tier, digest: bytes, block_id: int) -> BlockMove:
        self._num_moves += 1
        return BlockMove(self._num_moves, kind, tier, digest, block_id)

    def take_moves(self, *, beside_rows: bool) -> Moves:
        """Return what the next step hands to the mover. `beside_rows`: the step has rows."""
        if self._queued:
            self._begin_queued(beside_rows=beside_rows)
        taken = Moves(tuple(self._moves), tuple(self._drops), tuple(self._cancelled))
        self._moves, self._drops, self._cancelled = [], [], []
        return taken

    # --- what the mover tells -------------------------------------------------------------------------------------

    def ended(self, result: MoveResult, now: float) -> None:
        """A move has ended. A load's block and its requests are the caller's."""
        known = self._known[result.move.tier]
        if result.move.kind is MoveKind.LOAD:
            self._under_way.pop(result.move.move_id, None)
            self._let_go(result.move.digest)
            self.epoch += bool(result.error)  # it is no longer coming
        if not result.error:
            self.rates.note_move(result, now)
        if result.move.kind is MoveKind.STORE:
            self._stored(known, result, now)
        elif result.error:
            self._forget(result.move.tier, result.move.digest)
            known.totals.failed_loads += 1
        else:
            known.totals.hit_blocks += 1
            known.totals.loaded_bytes += result.num_bytes
            known.totals.load_s += result.seconds

    def _stored(self, known: _Known, result: MoveResult, now: float) -> None:
        digest, tier = result.move.digest, result.move.tier
        facts = known.storing.pop(digest, None)
        if facts is None:
            return  # forgotten meanwhile by `reset`
        known.is_busy = result.error == BUSY
        if result.error == BUSY:
            known.totals.refused_stores += 1
            known.dirty[digest] = facts
            known.dirty.move_to_end(digest, last=False)
        elif result.error:
            known.totals.failed_stores += 1
        else:
            known.totals.stored_blocks += 1
            known.totals.stored_bytes += result.num_bytes
            known.totals.store_s += result.seconds
            known.has[digest] = facts
            self.epoch += 1
            if tier is Tier.HOST:
                self._kept.add(digest, facts, now)

    def changed(self, change: TierChange) -> None:
        """A tier has or lacks a block by other hands."""
        known = self._known[change.tier]
        if not change.present:
            known.totals.evicted_blocks += change.digest in known.has
            self._forget(change.tier, change.digest)
        elif change.digest not in known.has:
            known.has[change.digest] = UNKNOWN
            known.dirty.pop(change.digest, None)
            self.epoch += 1

    def _forget(self, tier: Tier, digest: bytes) -> None:
        if self._known[tier].has.pop(digest, None) is not None:
            self.epoch += 1
            if tier is Tier.HOST:
                self._let_go(digest)
                self._kept.remove(digest)

    def reset(self) -> None:
        """Forget all blocks: the tiers were wiped. Loads under way end with an error, and stores count for nothing."""
        for tier, known in self._known.items():
            for digest in list(known.has):
                self._forget(tier, digest)
            known.dirty.clear()
            known.storing.clear()
            known.is_busy = False
        stale = {move.move_id for move in self._moves if move.kind is MoveKind.STORE}
        self._moves = [move for move in self._moves if move.move_id not in stale]
        self._drops.clear()
