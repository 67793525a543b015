"""Owns the parts that only few requests have: spans other than plain text, prompt scores, pooling, drafts,
KV on its way. Never decides anything: a request has one of each, or None."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.kv_tiers import Tier
from engine.multimodal_inputs import PlacedInput, SpanInput, overlapping, shift_at
from engine.protocol import DraftMethod, TokenLogprobs
from engine.step import PromptScoring, RowInputs


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Spans of a prompt that are not plain text."""

    atomic: tuple[tuple[int, int], ...] = ()
    """[start, end) of the spans that no chunk and no prefix hit may cut, in order."""
    inputs: tuple[SpanInput, ...] = ()
    """The contents of spans that are not text, in order."""
    placed: tuple[PlacedInput, ...] = ()
    """The same contents with their positions."""

    def cut_at(self, end: int) -> tuple[int, int] | None:
        """Return the atomic span that a chunk ending at `end` would cut, if any."""
        return next(((first, last) for first, last in self.atomic if first < end < last), None)

    def of_row(self, start: int, end: int) -> RowInputs | None:
        """Return the inputs at positions [start, end); None if there are none there or before."""
        row = RowInputs(overlapping(self.placed, start, end), shift_at(self.placed, start))
        return row if row.placed or row.shift else None


@dataclass(slots=True)
class Scoring:
    """Log-probabilities of the prompt's tokens, collected chunk by chunk and then sent. A preemption keeps them."""

    num_alternatives: int
    """Number of alternatives to return with each."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Entry i belongs to the prompt's token i + 1."""

    def of_chunk(self, token_ids: Sequence[int], prompt_len: int, start: int, end: int) -> PromptScoring | None:
        """Return the prompt tokens that positions [start, end) predict and that have no log-probability yet."""
        first = max(start, len(self.logprobs))
        tokens = tuple(token_ids[first + 1 : min(end + 1, prompt_len)])
        return PromptScoring(first, tokens, self.num_alternatives) if tokens else None


@dataclass(slots=True)
class Pooling:
    """Pools the prompt's final hidden states into one vector. A preemption keeps the sum so far."""

    method: Literal["mean", "last"]
    total: tuple[float, ...] = ()
    """The sum of the hidden states below `num_summed`, or the last position's hidden state."""
    num_summed: int = 0

    def first_of(self, start: int, end: int, prompt_len: int) -> int | None:
        """Return the first of positions [start, end) whose hidden state is not summed yet; None if there is none."""
        if self.method == "mean":
            first = max(start, self.num_summed)
            return first if first < end else None
        return end - 1 if end == prompt_len else None

    def add(self, values: tuple[float, ...], end: int) -> None:
        """Add the sum of further hidden states; positions below `end` are then summed."""
        self.total = tuple(map(operator.add, self.total, values)) if self.total else values
        self.num_summed = end

    def vector(self, prompt_len: int) -> tuple[float, ...]:
        """Return the pooled vector, [hidden size]."""
        count = prompt_len if self.method == "mean" else 1
        return tuple(value / count for value in self.total)


class Drafts(NamedTuple):
    """Tokens that may follow a request's newest one, for its next decode row to verify; at least one."""

    token_ids: tuple[int, ...]
    method: DraftMethod


class MemoryLack(NamedTuple):
    """That a long waiting prompt did not fit. It is taken not to fit until more blocks are available, or the cache has
    more of its beginning."""

    until: float
    """It is believed no longer than that, in monotonic seconds."""
    num_available: int
    """Blocks."""
    num_cached: int
    """Blocks of its beginning."""


class TierMatch(NamedTuple):
    """What of a waiting prompt could be had without computing it, and as of when."""

    epochs: tuple[int, int, int]
    """Those of the caches and of the tiers, and the blocks of the prompt that the KV cache had."""
    until: float
    """It is believed until then, in monotonic seconds, even if the epochs change."""
    reach: int
    """Blocks."""
    sources: Mapping[Tier, int]
    """How many of them are in which tier and no nearer place."""


@dataclass(slots=True)
class Loading:
    """KV that a waiting request has loaded from a lower tier."""

    block_ids: tuple[int, ...]
    """Held for it, from its first block on."""
    awaited: dict[int, None]
    """The ids of the moves that have not ended."""
    until: float
    """When it stops waiting unless a block comes, in monotonic seconds."""
