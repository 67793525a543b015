"""Owns what few requests have: spans that are more than text, prompt scores, pooling, drafts.
Never decides anything: a request has one of each, or None."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.multimodal_inputs import PlacedInput, SpanInput, overlapping, shift_at
from engine.protocol import DraftMethod, TokenLogprobs
from engine.step import PromptScoring, RowInputs


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Spans of a prompt that are more than one token after the other."""

    atomic: tuple[tuple[int, int], ...] = ()
    """[start, end) of those that no chunk and no prefix hit may cut, in order."""
    inputs: tuple[SpanInput, ...] = ()
    """What spans stand for besides text, in order."""
    placed: tuple[PlacedInput, ...] = ()
    """The same, with their positions."""

    def cut_at(self, end: int) -> tuple[int, int] | None:
        """The atomic span that a chunk would cut if it ended at `end`."""
        return next(((first, last) for first, last in self.atomic if first < end < last), None)

    def of_row(self, start: int, end: int) -> RowInputs | None:
        """What positions [start, end) hold besides text; None without inputs, and before the first of them."""
        row = RowInputs(overlapping(self.placed, start, end), shift_at(self.placed, start))
        return row if row.placed or row.shift else None


@dataclass(slots=True)
class Scoring:
    """Log-probabilities of the prompt's tokens, gathered chunk by chunk and then sent. A preemption keeps them."""

    num_alternatives: int
    """To return with each."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Entry i is of the prompt's token i + 1."""

    def of_chunk(self, token_ids: Sequence[int], prompt_len: int, start: int, end: int) -> PromptScoring | None:
        """The prompt tokens that positions [start, end) predict and that have no log-probability yet."""
        first = max(start, len(self.logprobs))
        tokens = tuple(token_ids[first + 1 : min(end + 1, prompt_len)])
        return PromptScoring(first, tokens, self.num_alternatives) if tokens else None


@dataclass(slots=True)
class Pooling:
    """The prompt's final hidden states as one vector. A preemption keeps what is summed."""

    method: Literal["mean", "last"]
    total: tuple[float, ...] = ()
    """The sum of the hidden states below `num_summed`, or of the last position's alone."""
    num_summed: int = 0

    def first_of(self, start: int, end: int, prompt_len: int) -> int | None:
        """The first of positions [start, end) whose hidden states are still to be summed."""
        if self.method == "mean":
            first = max(start, self.num_summed)
            return first if first < end else None
        return end - 1 if end == prompt_len else None

    def add(self, values: tuple[float, ...], end: int) -> None:
        """Positions below `end` are summed."""
        self.total = tuple(map(operator.add, self.total, values)) if self.total else values
        self.num_summed = end

    def vector(self, prompt_len: int) -> tuple[float, ...]:
        """[hidden size]"""
        count = prompt_len if self.method == "mean" else 1
        return tuple(value / count for value in self.total)


class Drafts(NamedTuple):
    """Tokens that may follow a request's newest one, for its next decode row to verify; at least one."""

    token_ids: tuple[int, ...]
    method: DraftMethod
