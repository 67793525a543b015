"""Owns the simulator's clock: an asyncio event loop whose time advances only when all tasks wait.
Never sleeps or reads a real clock: the same program runs in the same order each time."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class NothingLeftError(RuntimeError):
    """All tasks wait and no event is due, so the simulated program would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time, on which shipped code runs unchanged. Callbacks that are due at the same time
    run in the order in which they were scheduled.

    It has its own queue of ready callbacks and its own heap of timers, so that a simulated step does not pass through a
    selector: there is no I/O here, and no other thread."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._due: deque[asyncio.Handle] = deque()
        self._later: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._later, (when, next(self._numbers), handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Run everything that is due. If nothing is, advance the time to the next timer first.

        `run_forever` calls this until the loop is stopped, like asyncio's own method."""
        due, later = self._due, self._later
        while not due:
            if not later:
                raise NothingLeftError(f"at {self._now_s:.3f} s all tasks wait, and nothing is due")
            when, _, handle = heapq.heappop(later)
            if not handle.cancelled():
                self._now_s = max(when, self._now_s)
                due.append(handle)
        for _ in range(len(due)):
            ready = due.popleft()
            if not ready.cancelled():
                ready._run()


def run(program: Coroutine[Any, Any, Result]) -> Result:
    """Run a program on its own clock, which starts at 0 s.

    Raises:
        NothingLeftError: the program waits for something that never happens.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(program)
