"""Owns ranks that are threads of one process: engines in lockstep as a library, and in tests.
Never polls: a rank that waits for others sleeps until the last one arrives, one leaves, or the time is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.lockstep.ranks import RankGoneError


class ThreadRanks:
    """One rank's end of a group; see Ranks. `make_thread_ranks` makes all ends of one."""

    def __init__(self, rank: int, group: _Group) -> None:
        self._rank = rank
        self._group = group

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def is_awaited(self) -> bool:
        return self._group.awaits(self._rank)

    def on_awaited(self, wake: Callable[[], None]) -> None:
        self._group.wakes[self._rank] = wake
        if self.is_awaited:  # since before there was anybody to wake
            wake()

    def reduce_max(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return self._group.reduce_max(self._rank, numbers)

    def leave(self, reason: str) -> None:
        self._group.end(f"rank {self._rank} has left: {reason}", self._rank)


def make_thread_ranks(size: int, *, timeout_s: float = 60.0) -> list[ThreadRanks]:
    """Make a group of so many ranks. If a rank does not arrive within `timeout_s` of the one that waits for it, all
    end."""
    group = _Group(size, timeout_s)
    return [ThreadRanks(rank, group) for rank in range(size)]


class _Group:
    """The state that all ends share. No rank is ever more than one round ahead of another, so one result is enough."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.wakes: list[Callable[[], None] | None] = [None] * size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._votes: dict[int, tuple[int, ...]] = {}  # of the round that is open
        self._num_rounds = 0  # that are over
        self._result: tuple[int, ...] = ()  # of the last one
        self._ended: str | None = None

    def awaits(self, rank: int) -> bool:
        with self._changed:
            return self._ended is not None or (bool(self._votes) and rank not in self._votes)

    def reduce_max(self, rank: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
        with self._changed:
            self._check()
            mine, opens = self._num_rounds, not self._votes
            self._votes[rank] = numbers
            if len(self._votes) == self.size:
                self._result = tuple(map(max, zip(*self._votes.values(), strict=True)))
                self._votes, self._num_rounds = {}, mine + 1
                self._changed.notify_all()
                return self._result
        if opens:
            self._wake_others(rank)
        with self._changed:
            self._changed.wait_for(lambda: self._num_rounds > mine or self._ended is not None, self._timeout_s)
            if self._num_rounds > mine:
                return self._result
            missing = sorted(set(range(self.size)) - self._votes.keys())
        self.end(f"ranks {missing} did not arrive within {self._timeout_s:g} s", rank)
        with self._changed:
            self._check()
        raise AssertionError("the group has ended")

    def end(self, reason: str, rank: int) -> None:
        """End the group, unless it has ended already."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = reason
            self._changed.notify_all()
        self._wake_others(rank)

    def _check(self) -> None:
        if self._ended is not None:
            raise RankGoneError(f"The ranks have stopped together: {self._ended}.")

    def _wake_others(self, rank: int) -> None:
        for other, wake in enumerate(self.wakes):
            if other != rank and wake is not None:
                wake()
