"""Owns what is known of encoded contents: which are kept, who needs them, and what a step may have encoded.
Never holds an embedding: an executor does, and is told by plans what to encode and what to drop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from engine.multimodal_inputs import EncodeJob, PlacedInput, SpanInput, overlapping
from engine.scheduling.request import Request
from engine.scheduling.resources import Resource, RowParts, StepParts
from engine.step import ScheduledRequest, StepPlan


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


class EncodedInputs(Resource):
    """What requests with inputs hold: their contents, encoded, from the first row that needs them to the last."""

    def __init__(self, capacity: int, step_tokens: int) -> None:
        """capacity: tokens that can be kept; step_tokens: that a step encodes."""
        self.cache = EncoderCache(capacity)
        self._step_tokens = step_tokens
        self._needed: list[tuple[SpanInput, PlacedInput]] = []  # by the rows of the step that is being made

    def allowance(self) -> EncoderAllowance:
        return EncoderAllowance(self.cache, self._step_tokens)

    def take(self, request: Request, start: int, end: int, parts: RowParts) -> None:
        """All that the rows of a step need is held before any of it is encoded, which may drop what nobody holds."""
        if request.spans is None or not request.spans.inputs:
            return
        parts.inputs = request.spans.of_row(start, end)
        for given, placed in zip(request.spans.inputs, request.spans.placed, strict=True):
            if placed.start < end and start < placed.end:
                self.cache.hold(placed.digest, request.request_id)
                self._needed.append((given, placed))

    def finish(self, parts: StepParts) -> None:
        parts.encodes = tuple(
            EncodeJob(placed.digest, given.grid, given.data)
            for given, placed in self._needed
            if self.cache.use(placed.digest, given.num_tokens)
        )
        self._needed.clear()
        parts.dropped = self.cache.take_dropped()

    def advance(self, request: Request, row: ScheduledRequest, end: int) -> None:
        for placed in _placed(request):
            if placed.end <= end:
                self.cache.let_go(placed.digest, request.request_id)

    def lose(self, step: StepPlan) -> None:
        """What was to be encoded may be there or not."""
        self.cache.lose(job.digest for job in step.encodes)

    def release(self, request: Request) -> None:
        for placed in _placed(request):
            self.cache.let_go(placed.digest, request.request_id)


class EncoderAllowance:
    """What one plan may still have encoded."""

    def __init__(self, cache: EncoderCache, budget: int) -> None:
        """budget: tokens of contents that a step encodes. A first one may have more: it is never encoded in parts."""
        self._cache = cache
        self._budget = budget
        self._cost = 0
        self._needed: dict[bytes, int] = {}
        # A prompt with inputs got no tokens. Later ones would take the room in the cache that becomes free.
        self._is_awaited = False

    def reach(self, request: Request, start: int, end: int, gone: Iterable[str] = ()) -> int:
        """To where an input begins that has to wait."""
        needed, cost = dict(self._needed), self._cost
        for placed in overlapping(_placed(request), start, end):
            if placed.digest in needed:
                continue
            size = needed[placed.digest] = prod(placed.grid)
            if placed.digest not in self._cache:
                if cost and cost + size > self._budget:
                    return max(placed.start, start)
                cost += size
            if not self._cache.has_room(needed, gone):
                return max(placed.start, start)
        return end

    def take(self, request: Request, start: int, end: int) -> None:
        for placed in overlapping(_placed(request), start, end):
            if placed.digest not in self._needed:
                size = self._needed[placed.digest] = prod(placed.grid)
                self._cost += size * (placed.digest not in self._cache)

    def put_off(self, request: Request) -> None:
        self._is_awaited |= bool(_placed(request))

    def is_kept_from(self, request: Request) -> bool:
        return self._is_awaited and bool(_placed(request))


def _placed(request: Request) -> tuple[PlacedInput, ...]:
    return () if request.spans is None else request.spans.placed
