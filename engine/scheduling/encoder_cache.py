"""Owns what is known of encoded contents: which are kept, who needs them, and what a step may have encoded.
Never holds an embedding: an executor does, and is told by plans what to encode and what to drop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from engine.multimodal_inputs import EncodeJob, PlacedInput, overlapping
from engine.scheduling.request import Request


class EncoderCache:
    """Sizes are in tokens. What nobody holds is kept as long as there is room, and dropped by age of last use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self._sizes: dict[bytes, int] = {}  # kept contents, the least recently used first
        self._holders: dict[bytes, set[str]] = {}
        self._dropped: list[bytes] = []  # since the last step

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    @property
    def num_held(self) -> int:
        """Contents that requests hold."""
        return len(self._holders)

    def has_room(self, needed: Mapping[bytes, int], gone: Iterable[str]) -> bool:
        """Whether `needed` can be kept together with what requests hold, those of `gone` left out."""
        away = frozenset(gone)
        held = sum(
            self._sizes.get(digest, 0)
            for digest, holders in self._holders.items()
            if digest not in needed and not holders <= away
        )
        return held + sum(needed.values()) <= self.capacity

    def hold(self, digest: bytes, request_id: str) -> None:
        """Keep the content until the request lets go of it. Idempotent."""
        self._holders.setdefault(digest, set()).add(request_id)

    def let_go(self, digest: bytes, request_id: str) -> None:
        """Idempotent."""
        holders = self._holders.get(digest, set())
        holders.discard(request_id)
        if not holders:
            self._holders.pop(digest, None)

    def use(self, digest: bytes, size: int) -> bool:
        """Whether it has to be encoded. It is held, and now the last that was used."""
        if self._sizes.pop(digest, None) is not None:
            self._sizes[digest] = size
            return False
        while self.num_tokens + size > self.capacity:
            oldest = next((other for other in self._sizes if other not in self._holders), None)
            assert oldest is not None, "a plan needs more than can be kept"
            self.lose([oldest])
        self._sizes[digest] = size
        self.num_tokens += size
        return True

    def lose(self, digests: Iterable[bytes]) -> None:
        """Forget contents: their step failed, or others need the room. The next step drops what is there of them."""
        for digest in digests:
            self.num_tokens -= self._sizes.pop(digest, 0)
            self._dropped.append(digest)

    def take_dropped(self) -> tuple[bytes, ...]:
        dropped, self._dropped = tuple(dict.fromkeys(self._dropped)), []
        return dropped

    # --- requests ------------------------------------------------------------------------------------------------

    def begin(self, request: Request, start: int, end: int) -> tuple[PlacedInput, ...]:
        """A row computes [start, end): the inputs that it needs, which are held from now on."""
        needed = overlapping(request.placed_inputs, start, end)
        for one in needed:
            self.hold(one.digest, request.request_id)
        return needed

    def encodes(self, requests: Iterable[tuple[Request, tuple[PlacedInput, ...]]]) -> tuple[EncodeJob, ...]:
        """What has to be encoded for rows that have begun."""
        found = []
        for request, needed in requests:
            for one in needed:
                if self.use(one.digest, prod(one.grid)):
                    given = next(given for given in request.inputs if given.start == one.start)
                    found.append(EncodeJob(one.digest, given.grid, given.data))
        return tuple(found)

    def advance(self, request: Request, end: int) -> None:
        """Positions below `end` are computed."""
        for one in request.placed_inputs:
            if one.end <= end:
                self.let_go(one.digest, request.request_id)

    def leave(self, request: Request) -> None:
        """The request gives everything back."""
        for one in request.placed_inputs:
            self.let_go(one.digest, request.request_id)


class EncoderRoom:
    """What one plan may still have encoded."""

    def __init__(self, cache: EncoderCache, budget: int) -> None:
        """budget: tokens of contents that a step encodes. A first one may have more: it is never encoded in parts."""
        self._cache = cache
        self._budget = budget
        self._cost = 0
        self._needed: dict[bytes, int] = {}

    def reach(self, request: Request, start: int, end: int, gone: Iterable[str] = ()) -> int:
        """How far a row from `start` may go: to `end`, or to where an input begins that has to wait."""
        needed, cost = dict(self._needed), self._cost
        for one in overlapping(request.placed_inputs, start, end):
            if one.digest in needed:
                continue
            size = needed[one.digest] = prod(one.grid)
            if one.digest not in self._cache:
                if cost and cost + size > self._budget:
                    return max(one.start, start)
                cost += size
            if not self._cache.has_room(needed, gone):
                return max(one.start, start)
        return end

    def take(self, request: Request, start: int, end: int) -> None:
        """A row computes [start, end), within what `reach` allows."""
        for one in overlapping(request.placed_inputs, start, end):
            if one.digest not in self._needed:
                size = self._needed[one.digest] = prod(one.grid)
                self._cost += size * (one.digest not in self._cache)
