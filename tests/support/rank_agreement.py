"""Owns what both agreements between ranks (engine.lockstep.ranks.Ranks) are held to: one maximum, and who is woken.
Never makes ranks: those of threads and those of a group have tests of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Protocol

from engine.lockstep.lockstep import UnevenRanksError
from engine.lockstep.ranks import RankGoneError


class Waking(Protocol):
    """A rank that may be asked whether another waits for it."""

    @property
    def is_awaited(self) -> bool: ...

    def on_awaited(self, wake: Callable[[], None]) -> None: ...

    def reduce_max(self, numbers: tuple[int, ...]) -> tuple[int, ...]: ...


def each(*calls: Callable[[], object]) -> list[object]:
    """Run the calls at the same time, each on its thread, and return their results or errors."""

    def run(call: Callable[[], object]) -> object:
        try:
            return call()
        except RankGoneError as error:
            return str(error)
        except UnevenRanksError:
            return UnevenRanksError

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def check_woken(first: Waking, second: Waking) -> None:
    """Check that a rank is awaited from the first call of another on until its own."""
    woken = Event()
    second.on_awaited(woken.set)
    assert not second.is_awaited

    def answer() -> tuple[int, ...]:
        assert woken.wait(10)
        assert second.is_awaited
        assert not first.is_awaited
        return second.reduce_max((2,))

    assert each(lambda: first.reduce_max((1,)), answer) == [(2,), (2,)]
    assert not first.is_awaited
    assert not second.is_awaited
