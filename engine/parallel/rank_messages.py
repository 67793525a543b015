"""Owns what the leader and the ranks with requests of their own tell each other beside the steps.
Never carries a tensor, or anything that a step waits for but the word that a round is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import EngineError, Event, FinishReason, LoadSnapshot, Submission


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
    """To a rank: take a request."""

    submission: Submission


@dataclass(frozen=True, slots=True)
class Abort:
    """To a rank: see AsyncEngine.abort."""

    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Drain:
    """To a rank: take no more requests, and say when all have drained."""


@dataclass(frozen=True, slots=True)
class End:
    """To a rank: end."""


@dataclass(frozen=True, slots=True)
class Told:
    """From a rank: what has happened to a request, and the load since."""

    request_id: str
    events: Sequence[Event]
    load: LoadSnapshot


@dataclass(frozen=True, slots=True)
class Rejected:
    """From a rank: a request was not taken."""

    request_id: str
    error: EngineError


@dataclass(frozen=True, slots=True)
class Drained:
    """From a rank: all have drained."""
