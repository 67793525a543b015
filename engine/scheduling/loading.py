"""Owns the waiting requests whose KV comes from a tier, from the planned load until they wait for a seat again.
Never decides that a load is worth it: a plan does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.kv_tiers import BlockMove, MoveResult
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.planner import MOST_LOADS, PlannedLoad
from engine.scheduling.request import Request
from engine.scheduling.request_parts import Loading
from engine.scheduling.tier_index import TierIndex
from engine.scheduling.waiting import WaitingQueue


@dataclass(slots=True)
class _Load:
    """A block on its way to the device."""

    move: BlockMove
    waiting: dict[Request, None] = field(default_factory=dict)
    """The requests that need it. Each holds the block."""


class Loads:
    """Requests that load. They hold blocks but no seat, and lose them before any running request does."""

    def __init__(self, tiers: TierIndex, blocks: BlockManager, waiting: WaitingQueue, timeout_s: float) -> None:
        self.requests: dict[str, Request] = {}
        """In the order in which they began to load."""
        self._tiers = tiers
        self._blocks = blocks
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._under_way: dict[int, _Load] = {}  # by move id
        self._move_of: dict[bytes, int] = {}
        self._last_end = -math.inf  # of a load, in seconds

    @property
    def next_deadline(self) -> float | None:
        """When the first of them has waited for too long."""
        return min((request.loading.until for request in self.requests.values() if request.loading), default=None)

    @property
    def coming(self) -> Collection[bytes]:
        """The digests of the blocks that are being loaded."""
        return self._move_of.keys()

    def claim(self, planned: Sequence[PlannedLoad]) -> list[list[int | None]]:
        """Hold the blocks of these requests that the KV cache has, before anybody takes a block and evicts others.
        Returns them, with None for each that it lacks; `fetch` must follow."""
        return [self._claim(load) for load in planned]

    def _claim(self, load: PlannedLoad) -> list[int | None]:
        found = [self._blocks.block_of(digest) for digest in load.request.block_hashes[: load.num_blocks]]
        self._blocks.claim([block_id for block_id in found if block_id is not None])
        return found

    def fetch(self, planned: Sequence[PlannedLoad], claimed: Sequence[Sequence[int | None]], now: float) -> None:
        """Begin to load what was not claimed."""
        for load, found in zip(planned, claimed, strict=True):
            request = load.request
            self._waiting.remove(request)
            self.requests[request.request_id] = request
            request.num_loads += 1
            request.loading = loading = Loading((), {}, now + self._timeout_s)
            taken: list[int] = []
            for digest, claimed_id in zip(request.block_hashes, found, strict=False):
                block_id = self._fetch(loading, request, digest) if claimed_id is None else claimed_id
                if block_id is None:  # the plan believed an older look at the tiers
                    self._blocks.release([other for other in found[len(taken) :] if other is not None])
                    request.tier_match = None
                    break
                taken.append(block_id)
            loading.block_ids = tuple(taken)
            if not loading.awaited:
                self.put_back(request)

    def _fetch(self, loading: Loading, request: Request, digest: bytes) -> int | None:
        """Hold a block that is being loaded, or begin to load it; None if no tier has it."""
        move_id = self._move_of.get(digest)
        if move_id is None:
            if (tier := self._tiers.nearest(digest)) is None:
                return None
            (block_id,) = self._blocks.allocate(1)
            move = self._tiers.begin_load(digest, tier, block_id)
            move_id = self._move_of[digest] = move.move_id
            self._under_way[move_id] = _Load(move)
        else:
            block_id = self._under_way[move_id].move.block_id
            self._blocks.share([block_id])
        self._under_way[move_id].waiting[request] = None
        loading.awaited[move_id] = None
        return block_id

    def ended(self, result: MoveResult, now: float) -> list[Request]:
        """A load has ended: publish its block if it came, and return the requests that wait for a seat again."""
        load = self._under_way.pop(result.move.move_id, None)
        if load is None:
            return []  # cancelled
        self._last_end = now
        del self._move_of[load.move.digest]
        if not result.error:
            self._blocks.publish(load.move.block_id, load.move.digest)
        for request in load.waiting:
            assert request.loading is not None
            del request.loading.awaited[result.move.move_id]
            request.loading.until = now + self._timeout_s
        return [request for request in load.waiting if self._is_done(request)]

    def _is_done(self, request: Request) -> bool:
        assert request.loading is not None
        if request.loading.awaited:
            return False
        self.put_back(request)
        return True

    def late(self, now: float) -> list[Request]:
        """Put back the requests for which no block came in too long, to be computed, and return them."""
        late = []
        for request in list(self.requests.values()):
            loading = request.loading
            assert loading is not None
            if loading.until > now:
                continue
            loading.until = self._patience(loading)
            if loading.until > now:
                continue
            tiers = Counter(self._under_way[move_id].move.tier for move_id in loading.awaited)
            self._tiers.note_late(tiers, self._timeout_s, now)
            self.put_back(request)
            request.num_loads = MOST_LOADS
            late.append(request)
        return late

    def _patience(self, loading: Loading) -> float:
        """Return until when a request waits. Loads that wait for others to end are not late, as long as others end."""
        begun = self._tiers.begun_at(loading.awaited)
        since = self._last_end if begun is None else begun
        return max(loading.until, since + self._timeout_s)

    def put_back(self, request: Request) -> None:
        """Let a request wait for a seat without what it has not loaded yet."""
        self.give_up(request)
        self._waiting.add(request)

    def give_up(self, request: Request) -> None:
        """End a request's loading. What others wait for, too, goes on; what came stays in the KV cache until it is
        evicted."""
        loading, request.loading = request.loading, None
        assert loading is not None
        del self.requests[request.request_id]
        for move_id in loading.awaited:
            load = self._under_way[move_id]
            del load.waiting[request]
            if not load.waiting:
                del self._under_way[move_id], self._move_of[load.move.digest]
                self._tiers.cancel_load(load.move)
        self._blocks.release(loading.block_ids)
