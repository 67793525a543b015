"""Owns what an engine tells whoever measures it: a request that came or was refused, and what each step did.
Never measures; an observer is called on the engine's own threads, and must be quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import ErrorCode, Event, Submission


@dataclass(slots=True)
class StepFacts:
    """What a call of EngineCore.step did that its events do not tell."""

    started: float
    """Monotonic seconds: when it was planned. Requests whose Scheduled event it returns were scheduled then."""
    num_tokens: int = 0
    """That the step which was read back has computed, of prompts and of answers; 0 if none was read back."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their memory in it."""


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
