"""Owns the agreement of ranks that are processes: the maximum over a group, and the word that one of them waits.
Never plans, and never carries that word itself: the ranks' lines do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from engine.lockstep.ranks import RankGoneError
from engine.parallel.rank_messages import Left, Opened
from kernels.collectives.group import ExchangeGroup, RankLostError


class GroupRanks:
    """One rank's end; see engine.lockstep.ranks.Ranks."""

    def __init__(self, group: ExchangeGroup, tell: Callable[[Opened | Left], None]) -> None:
        """group: has been joined. The same thread makes its exchanges in steps. tell: all other ranks, without waiting;
        any thread calls it. What they tell goes to `opened` and `lose`."""
        self._group = group
        self._tell = tell
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self._begun = 0  # rounds that this rank has come to
        self._opened = 0  # the last round that another rank was heard to wait in
        self._ended: str | None = None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def late_s(self) -> Sequence[float]:
        """See Group."""
        return self._group.late_s

    @property
    def is_awaited(self) -> bool:
        with self._lock:
            return self._ended is not None or self._opened > self._begun

    def on_awaited(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self.is_awaited:  # since before there was anybody to wake
            wake()

    def reduce_max(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        with self._lock:
            if self._ended is not None:
                raise self._gone(self._ended)
            self._begun += 1
            opens = self._opened < self._begun
        if opens:
            self._tell(Opened(self._begun))
        own = torch.tensor([numbers] * self.size)
        try:
            found, _ = self._group.exchange(own, [1] * self.size)
        except RankLostError as error:
            raise self._gone(self._ended or str(error)) from error
        return tuple(found.amax(0).tolist())

    def opened(self, number: int) -> None:
        """Note that another rank waits in a round. A word that comes late changes nothing."""
        with self._lock:
            self._opened = max(self._opened, number)
        self._wake_up()

    def lose(self, reason: str) -> None:
        """Let no further round be completed here, and wake this rank to see it. Any thread; again has no effect."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
        self._group.give_up(reason)  # whoever is in an exchange waits for nobody any more
        self._wake_up()

    def leave(self, reason: str) -> None:
        known = self._ended is not None
        self.lose(reason if known else f"rank {self.rank} has left: {reason}")
        if not known:
            self._tell(Left(self._ended or reason))

    def _wake_up(self) -> None:
        if self.is_awaited and self._wake is not None:
            self._wake()

    @staticmethod
    def _gone(reason: str) -> RankGoneError:
        return RankGoneError(f"The ranks have stopped together: {reason.removesuffix('.')}.")
