"""Owns what ranks tell each other before a step: its shape, whether they still have requests, what they are set to.
Never waits for ranks while all are idle: a rank without work answers when it is awaited, and otherwise sleeps."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from engine.lockstep.ranks import Ranks
from engine.lockstep.shape import NO_STEP, StepShape


class UnevenRanksError(Exception):
    """Ranks have different settings, so that their exchanges would differ."""


class Lockstep:
    """One rank's part in the agreement. The thread that steps its engine uses it; `leave` and the properties may be
    used on any."""

    def __init__(self, ranks: Ranks, settings: object) -> None:
        """`settings`: all that decides, besides a step's shape, which exchanges it makes. Its `repr` must be the same
        on all ranks."""
        self._ranks = ranks
        self._digest = crc32(repr(settings).encode())
        self._has_drained = False
        self._has_told = False  # the others, that it has drained
        self._have_all_drained = False

    @property
    def is_due(self) -> bool:
        """Whether the rank must call `agree` even if it has no work."""
        return self._ranks.is_awaited or (self._has_drained and not self._has_told)

    @property
    def have_all_drained(self) -> bool:
        return self._have_all_drained

    def on_due(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, whenever other ranks make `is_due` true."""
        self._ranks.on_awaited(wake)

    def agree(self, shape: StepShape) -> StepShape:
        """Return the shape that the next step has on all ranks, which covers this rank's own. NO_STEP without a word to
        the others if this rank has no step and nobody waits for it.

        Raises:
            RankGoneError: a rank has left, so that there is no next step.
            UnevenRanksError: the ranks are not set to the same.
        """
        if not shape.forwards and not self.is_due:
            return NO_STEP
        self._has_told = self._has_drained
        own = (*shape, self._digest, -self._digest, int(not self._has_drained))
        *numbers, most, least, still_serves = self._ranks.reduce_max(own)
        if most != -least:
            raise UnevenRanksError(
                "The ranks have different settings; only the KV cache's size and the device may differ."
            )
        self._have_all_drained = not still_serves
        return StepShape(*numbers)

    def drain(self) -> None:
        """Tell the others with the next round that this rank has no requests and takes no more."""
        self._has_drained = True

    def leave(self, reason: str) -> None:
        """End all ranks: no other step can be agreed on. Steps that were agreed on must still be made."""
        self._ranks.leave(reason)
