"""Owns what the leader and the ranks with requests of their own tell each other beside the steps.
Never carries a tensor, or anything that a step waits for but the word that a round is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.observer import StepFacts
from engine.protocol import Event, FinishReason, LoadSnapshot, Submission


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank has a step to agree on, and waits for the others. Both ways; the leader passes it on."""

    round: int
    """Rounds are counted from 1."""


@dataclass(frozen=True, slots=True)
class Left:
    """A rank has ended, and so do all. Both ways; the leader passes it on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Submit:
    """To a rank: take a request, which the leader has checked."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class Abort:
    """To a rank: see AsyncEngine.abort."""

    request_id: str
    reason: FinishReason


class Question(Enum):
    """What an engine is asked between two steps."""

    CACHED_DIGESTS = "cached_digests"
    RESET_PREFIX_CACHE = "reset_prefix_cache"


@dataclass(frozen=True, slots=True)
class Ask:
    """To a rank: call the method of its engine with this name."""

    number: int
    question: Question
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """To a rank: take no more requests, and make the others' steps until all have drained."""


@dataclass(frozen=True, slots=True)
class End:
    """To a rank: end."""


@dataclass(frozen=True, slots=True)
class Told:
    """From a rank: what has happened to its requests in a step, and its load since."""

    events: Sequence[Event]
    load: LoadSnapshot


@dataclass(frozen=True, slots=True)
class Stepped:
    """From a rank: see EngineObserver.stepped."""

    facts: StepFacts
    events: Sequence[Event]
    age_s: float
    """How long ago the step began, when this was sent. Machines have no monotonic clock in common."""


@dataclass(frozen=True, slots=True)
class Answer:
    """From a rank: what a question's method has returned."""

    number: int
    result: int | list[bytes]
