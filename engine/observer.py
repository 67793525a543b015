"""Owns the interface for measuring an engine: accepted and refused requests, and the facts of each step.
Never measures: an observer does, which is called on the engine's own threads and must be quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from engine.protocol import DraftMethod, ErrorCode, Event, Submission
from engine.step import RowKind, StepPlan


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that was read back: its rows and its duration."""

    step_id: int
    """Increases from step to step, by more than one after a failed step."""
    num_decodes: int
    """Number of decode rows."""
    chunks: tuple[int, ...]
    """Tokens of each prefill chunk, in the plan's order."""
    num_tokens: int
    """Tokens of all rows; a decode row with drafts has more than one."""
    num_waiting: int
    """Requests that waited in the engine when the step was read back."""
    duration_s: float
    """Time in the executor, from the launch until the step was read back; without the wait for the step before, which
    an overlapped step is launched beside."""
    num_encoded: int = 0
    """Tokens of inputs, such as images, that were encoded before the rows."""
    predicted_s: float | None = None
    """Predicted time from this step's begin to the next one's; None if the engine predicts none."""

    @classmethod
    def of(cls, step: StepPlan, num_waiting: int, duration_s: float, predicted_s: float | None = None) -> ComputedStep:
        chunks = tuple(len(row.token_ids) for row in step.rows if row.kind is not RowKind.DECODE)
        num_decodes, encoded = len(step.rows) - len(chunks), sum(prod(work.grid) for work in step.encodes)
        return cls(step.step_id, num_decodes, chunks, step.num_tokens, num_waiting, duration_s, encoded, predicted_s)

    @property
    def line(self) -> str:
        """The step as one line of a log."""
        return (
            f"step={self.step_id} decode={self.num_decodes} prefill_requests={len(self.chunks)} "
            f"prefill_tokens={sum(self.chunks)} encoded={self.num_encoded} waiting={self.num_waiting} "
            f"us={round(self.duration_s * 1e6)}"
        )


class Verified(NamedTuple):
    """The result of a decode row with drafts."""

    request_id: str
    method: DraftMethod
    num_drafted: int
    num_accepted: int
    """Drafts before the first that would not have been sampled, including those after a token that ends the answer."""


@dataclass(slots=True)
class StepFacts:
    """Facts about a call of EngineCore.step that its events do not contain."""

    started: float
    """When the step was planned, in monotonic seconds. Requests with a Scheduled event in it were scheduled then."""
    computed: tuple[ComputedStep, ...] = ()
    """The steps that were read back: at most one, or with overlap two, if the second had nothing to wait for."""
    preempted: tuple[str, ...] = ()
    """Requests that were preempted in the step."""
    verified: tuple[Verified, ...] = ()
    """Results of the drafts in the steps that were read back."""
    grammar_s: float = 0.0
    """How long the steps that were read back waited for grammars."""

    @property
    def num_encoded(self) -> int:
        """Tokens of inputs that the computed steps encoded."""
        return sum(step.num_encoded for step in self.computed)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers that the computed steps computed."""
        return sum(step.num_tokens for step in self.computed)


class EngineObserver(Protocol):
    """Is told of everything once. For each request the order is: submitted, then `stepped` up to its terminal event."""

    def submitted(self, submission: Submission) -> None:
        """A request was accepted. Called on the caller's thread."""
        ...

    def rejected(self, code: ErrorCode) -> None:
        """A request was refused, with the code of the RequestRejected. Called on the caller's thread."""
        ...

    def stepped(self, facts: StepFacts, events: Sequence[Event]) -> None:
        """A step was done. Called on the step thread before `events` are sent to their readers, so that an answer is
        counted when its reader has it. `events` are those of the step and of aborts before it. Where other ranks have
        requests of their own, each rank's steps come on a thread of their own, and several at the same time."""
        ...
