"""Owns the bookkeeping of encoded contents: which are kept, which requests need them, and what a step may encode.
Never holds an embedding: an executor does, and plans tell it what to encode and what to drop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from engine.multimodal_inputs import EncodeJob, PlacedInput, SpanInput, overlapping
from engine.scheduling.request import Request
from engine.scheduling.resources import Resource, RowParts, StepParts
from engine.step import ScheduledRequest, StepPlan


class EncoderCache:
    """Sizes are in tokens. Contents that no request holds are kept while there is room, and dropped by age of last
    use."""

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
        """Number of contents that requests hold."""
        return len(self._holders)

    def has_room(self, needed: Mapping[bytes, int], gone: Iterable[str]) -> bool:
        """Whether `needed` can be kept together with the contents that requests other than `gone` hold."""
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
        """Release a content for a request. Idempotent."""
        holders = self._holders.get(digest, set())
        holders.discard(request_id)
        if not holders:
            self._holders.pop(digest, None)

    def use(self, digest: bytes, size: int) -> bool:
        """Mark a held content as the most recently used, making room if needed. Returns whether it must be encoded."""
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
        """Forget contents: their step failed, or others need the room. The next step drops their embeddings."""
        for digest in digests:
            self.num_tokens -= self._sizes.pop(digest, 0)
            self._dropped.append(digest)

    def drop_again(self, digests: Iterable[bytes]) -> None:
        """Have the next step drop contents that a failed step may not have dropped, unless they are kept again."""
        self._dropped += [digest for digest in digests if digest not in self._sizes]

    def take_dropped(self) -> tuple[bytes, ...]:
        dropped, self._dropped = tuple(dict.fromkeys(self._dropped)), []
        return dropped


class EncodedInputs(Resource):
    """The encoded contents that requests hold, from the first row that needs them to the last."""

    def __init__(self, capacity: int, step_tokens: int) -> None:
        """`capacity` is the tokens that can be kept, `step_tokens` the tokens that a step encodes."""
        self.cache = EncoderCache(capacity)
        self._step_tokens = step_tokens
        self._needed: list[tuple[SpanInput, PlacedInput]] = []  # for the rows of the step under construction

    def allowance(self) -> EncoderAllowance:
        return EncoderAllowance(self.cache, self._step_tokens)

    def take(self, request: Request, start: int, end: int, parts: RowParts) -> None:
        """Hold the contents of a row. All rows hold theirs before any is encoded, since encoding may drop unheld
        ones."""
        if request.spans is None or not request.spans.inputs:
            return
        parts.inputs = request.spans.of_row(start, end)
        for span, placed in zip(request.spans.inputs, request.spans.placed, strict=True):
            if placed.start < end and start < placed.end:
                self.cache.hold(placed.digest, request.request_id)
                self._needed.append((span, placed))

    def finish(self, parts: StepParts) -> None:
        parts.encodes = tuple(
            EncodeJob(placed.digest, span.grid, span.data)
            for span, placed in self._needed
            if self.cache.use(placed.digest, span.num_tokens)
        )
        self._needed.clear()
        parts.dropped = self.cache.take_dropped()

    def advance(self, request: Request, row: ScheduledRequest, end: int) -> None:
        for placed in _placed(request):
            if placed.end <= end:
                self.cache.let_go(placed.digest, request.request_id)

    def lose(self, step: StepPlan) -> None:
        """Forget what the step should have encoded: it may or may not exist. So may what it should have dropped."""
        self.cache.lose(job.digest for job in step.encodes)
        self.cache.drop_again(step.dropped)

    def release(self, request: Request) -> None:
        for placed in _placed(request):
            self.cache.let_go(placed.digest, request.request_id)


class EncoderAllowance:
    """What one plan may still encode."""

    def __init__(self, cache: EncoderCache, budget: int) -> None:
        """`budget` is the tokens of contents that a step encodes. The first content may have more, since it is never
        encoded in parts."""
        self._cache = cache
        self._budget = budget
        self._cost = 0
        self._needed: dict[bytes, int] = {}
        # Whether a prompt with inputs got no tokens. Later prompts must not take the cache room that becomes free.
        self._is_awaited = False

    def reach(self, request: Request, start: int, end: int, gone: Iterable[str] = ()) -> int:
        """Return `end`, or the begin of the first input that has to wait."""
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
