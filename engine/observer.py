"""Owns what an engine tells whoever measures it: a request that came or was refused, and what each step did.
Never measures; an observer is called on the engine's own threads, and must be quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from engine.protocol import DraftMethod, ErrorCode, Event, Submission
from engine.step import RowKind, StepPlan


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that was read back: what it carried, and how long it took."""

    step_id: int
    """Rises from step to step; not by one where a step failed."""
    num_decodes: int
    """Decode rows."""
    chunks: tuple[int, ...]
    """Tokens of each prefill chunk, in the plan's order."""
    num_tokens: int
    """Of all rows; a decode row with drafts has more than one."""
    num_waiting: int
    """Requests that waited in the engine when it was read back."""
    duration_s: float
    """With the executor, from its launch until it was read back."""
    num_encoded: int = 0
    """Tokens of inputs, such as images, that were encoded before the rows."""

    @classmethod
    def of(cls, step: StepPlan, num_waiting: int, duration_s: float) -> ComputedStep:
        chunks = tuple(len(row.token_ids) for row in step.rows if row.kind is not RowKind.DECODE)
        num_decodes, encoded = len(step.rows) - len(chunks), sum(prod(work.grid) for work in step.encodes)
        return cls(step.step_id, num_decodes, chunks, step.num_tokens, num_waiting, duration_s, encoded)


class Verified(NamedTuple):
    """A decode row that carried drafts was read back."""

    request_id: str
    method: DraftMethod
    num_drafted: int
    num_accepted: int
    """From the first on, up to the first that would not have been sampled; also those after a token that ends it."""


@dataclass(slots=True)
class StepFacts:
    """What a call of EngineCore.step did that its events do not tell."""

    started: float
    """Monotonic seconds: when it was planned. Requests whose Scheduled event it returns were scheduled then."""
    computed: tuple[ComputedStep, ...] = ()
    """What it read back: one step at most, or with overlap two, where the second had nothing to wait for."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their memory in it."""
    verified: tuple[Verified, ...] = ()
    """Drafts of the steps that were read back."""

    @property
    def num_encoded(self) -> int:
        """Tokens of inputs that they have encoded."""
        return sum(step.num_encoded for step in self.computed)

    @property
    def num_tokens(self) -> int:
        """That the steps which were read back have computed, of prompts and of answers."""
        return sum(step.num_tokens for step in self.computed)


class EngineObserver(Protocol):
    """Told of everything once, in order for each request: submitted, then `stepped` up to its terminal event."""

    def submitted(self, submission: Submission) -> None:
        """It was accepted. Called on the caller's thread."""
        ...

    def rejected(self, code: ErrorCode) -> None:
        """A request was refused, with the code of the RequestRejected. Called on the caller's thread."""
        ...

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        """Called on the step thread before `events` are on their way to their readers: who has an answer finds it
        counted. They are those of the step, and of aborts before it."""
        ...
