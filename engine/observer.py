"""Owns what an engine tells whoever measures it: a request that came or was refused, and what each step did.
Never measures; an observer is called on the engine's own threads, and must be quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import ErrorCode, Event, Submission
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

    @classmethod
    def of(cls, step: StepPlan, num_waiting: int, duration_s: float) -> ComputedStep:
        chunks = tuple(len(row.token_ids) for row in step.rows if row.kind is not RowKind.DECODE)
        return cls(step.step_id, len(step.rows) - len(chunks), chunks, step.num_tokens, num_waiting, duration_s)


@dataclass(slots=True)
class StepFacts:
    """What a call of EngineCore.step did that its events do not tell."""

    started: float
    """Monotonic seconds: when it was planned. Requests whose Scheduled event it returns were scheduled then."""
    computed: tuple[ComputedStep, ...] = ()
    """What it read back: one step at most, or with overlap two, where the second had nothing to wait for."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their memory in it."""

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
