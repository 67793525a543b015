"""Owns where a prompt's next chunk ends, by budgets, alignment, spans that must not be cut, and state snapshots.
Never looks at memory or at other requests: the planner says what room the step has."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ResolvedConfig
from engine.scheduling.request import Request

# The meaning of each policy value. A value that is missing here raises an error instead of acting like another.
CUT_BY_ENGINE = {"scheduler": False, "engine": True}
"""By chunk_owner: whether a prompt has one row, which the engine cuts."""
ENDS_BY_REQUEST = {"shared": False, "request_local": True}
"""By chunk_boundary: whether a chunk's end is independent of the rest of the step."""
MAY_EXTEND = {"defer": False, "extend": True}
"""By atomic_policy: whether a span may extend a chunk beyond the step's prefill budget."""


@dataclass(frozen=True, slots=True)
class Room:
    """The room that a step has left for a chunk."""

    budget: int
    """Prefill budget, as `ChunkRule.cost` counts it."""
    tokens: int
    """Tokens left in the whole step, after its decode rows."""
    has_prefill: bool
    """Whether the step already has a chunk."""
    is_empty: bool
    """Whether the step has no row at all."""


class ChunkRule:
    def __init__(self, config: ResolvedConfig, prefill_limit: int) -> None:
        """`prefill_limit` is max_prefill_tokens, or less after the executor ran out of memory."""
        self._config = config
        self._policy = config.scheduler
        self._limit = prefill_limit
        self._halving = self._policy.chunk_halving_context or 0
        # Limited by time, a chunk takes what fits: a block may be a third of it.
        by_time = config.targets.tpot_ms is not None
        self._align = self._policy.chunk_align or (1 if by_time else config.block_size)
        self._extends = MAY_EXTEND[self._policy.atomic_policy]
        self._ends_by_request = ENDS_BY_REQUEST[self._policy.chunk_boundary]
        self.is_cut_by_engine = CUT_BY_ENGINE[self._policy.chunk_owner]
        """A prompt that is longer than a step's prefill gets a step of its own."""
        self._is_chunked = self._policy.enable_chunked_prefill
        self.is_whole = self._ends_by_request or self.is_cut_by_engine or not self._is_chunked
        """A chunk's end depends on the request alone, so the chunk is taken whole or not at all."""

    def cost(self, start: int, count: int) -> int:
        """Return a chunk's cost in a step's prefill budget: its tokens, plus more for a longer context to attend to."""
        return count + -(-count * start // self._halving) if self._halving else count

    def _affordable(self, start: int, budget: int) -> int:
        """Return the maximum number of tokens from `start` that cost no more than `budget`."""
        return budget * self._halving // (self._halving + start) if self._halving else budget

    def size(self, request: Request, start: int, target: int, room: Room) -> int:
        """Return the tokens of the chunk from `start`; 0 means that it does not run in this step."""
        remaining = target - start
        if self.is_cut_by_engine:  # a prompt that does not fit gets the step to itself
            return remaining if remaining <= room.budget or room.is_empty else 0
        if not self._is_chunked:
            # A limit that was halved after a memory shortage could starve the first prompt of a step.
            return remaining if remaining <= (room.budget if room.has_prefill else room.tokens) else 0
        if self._ends_by_request:
            return self._local_size(request, start, remaining, room)
        most = self._affordable(start, room.budget)
        if not room.has_prefill:  # a prompt always advances, however long its context
            most = max(most, min(self._config.block_size, room.budget))
        count = min(remaining, most, self._policy.long_prefill_token_threshold or remaining)
        count = min(count, self.to_snapshot(start, remaining))
        if count < remaining:
            aligned = (start + count) // self._align * self._align - start
            # A chunk below the alignment waits for a step with more room, unless this step would have no other prefill.
            count = aligned if aligned > 0 else (0 if room.has_prefill else count)
        return self.outside_spans(request, start, start + count, most=self._span_room(room)) - start

    def _local_size(self, request: Request, start: int, remaining: int, room: Room) -> int:
        """Return the longest chunk that fits into a step whatever else the step carries."""
        beside_decodes = self._config.max_num_batched_tokens - self._config.max_decode_tokens
        budget = min(self._limit, beside_decodes)
        most = max(self._affordable(start, budget), min(self._config.block_size, budget))
        end = start + min(remaining, most, self._policy.long_prefill_token_threshold or most)
        own = self.outside_spans(request, start, end, most=self._config.max_atomic_span) - start
        if start + own > end:
            return own if own <= self._span_room(room) else 0
        cost = self.cost(start, own) if room.has_prefill else own
        return own if cost <= room.budget else 0

    def _span_room(self, room: Room) -> int:
        """Return the maximum tokens of a span. The first chunk of a step may use the whole step; otherwise a limit that
        was halved after a memory shortage could starve the span."""
        return room.tokens if self._extends or not room.has_prefill else room.budget

    def to_snapshot(self, start: int, remaining: int) -> int:
        """Return the tokens to the next position at which the recurrent state is saved; `remaining` if none is."""
        stride = self._policy.state_snapshot_tokens
        return stride - start % stride if stride and self._config.recurrent_state else remaining

    def outside_spans(self, request: Request, start: int, end: int, *, most: int) -> int:
        """Move `end` out of a span that it would cut. It moves forward to the span's end if the chunk then has no more
        than `most` tokens and either begins with the span or may be extended; otherwise it moves back to the span's
        begin."""
        cut = None if request.spans is None else request.spans.cut_at(end)
        if cut is None:
            return end
        begin, finish = cut
        if (begin <= start or self._extends) and finish - start <= most:
            return finish
        return max(begin, start)

    def cuts(self, request: Request, start: int, target: int) -> tuple[int, ...]:
        """Return where the engine cuts a prompt that is longer than a step's prefill (`chunk_owner: engine`)."""
        if not self.is_cut_by_engine:
            return ()
        cuts = []
        most = self._config.max_num_batched_tokens
        limit = min(self._limit, most)
        while target - start > limit:
            start = self.outside_spans(request, start, start + limit, most=most)
            cuts.append(start)
        return tuple(cut for cut in cuts if cut < target)
