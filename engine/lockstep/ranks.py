"""Owns the contract of ranks that run in lockstep: the maximum of a few integers over all of them, and their end.
Never says what the integers mean, and never how they travel: between threads, `engine.lockstep.threads` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class RankGoneError(Exception):
    """A rank has left or does not arrive, so that none can make another step. The message names the rank and why."""


class Ranks(Protocol):
    """One rank's end. One thread calls `reduce_max`; the other methods may be called on any.

    A round is over once every rank has called `reduce_max`, and then all get its result, also those that take it after
    a rank has left: whoever has it makes the step that it stands for, and so must all others.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_awaited(self) -> bool:
        """Whether another rank has called `reduce_max` and this one has not, or whether a rank has left."""

    def on_awaited(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, whenever `is_awaited` becomes true, so that an idle rank can sleep until then."""

    def reduce_max(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Wait until all ranks have called this, and return the maximum of each number.

        Raises:
            RankGoneError: on every rank alike, if one has left or does not arrive in time.
        """

    def leave(self, reason: str) -> None:
        """Let no further round be completed. The first rank's reason is the one that all are told; again has no
        effect."""
