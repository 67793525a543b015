"""Ends the requests of this ingress replica at their deadlines, or when somebody aborts them.
Never asks an engine: it ends the wait of the request's own task, which then lets go of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from serve_app.api.http.wait import Wait, WaitEnded
from serve_app.api.requests.deadline import GRACE_S, Deadline, now
from serve_app.errors.api_error import aborted


class Lifecycle:
    """Decides when one request is over. One timer serves all of its waits."""

    def __init__(self) -> None:
        self.deadline: Deadline | None = None
        self._with_engine = False
        self._waits: list[Wait] = []
        self._aborted = False
        self._timer: asyncio.TimerHandle | None = None

    def until(self, deadline: Deadline | None) -> None:
        """Set the deadline: as soon as one is known, and once the request has been read."""
        self.close()
        self.deadline = deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline.at, self._look)

    def given_to_engine(self) -> None:
        """From now on the engine ends the request at its deadline, and gets GRACE_S longer to do so."""
        self._with_engine = True

    def bound(self) -> Bound:
        """Make the context manager that bounds the waits of one task."""
        wait = Wait()
        self._waits.append(wait)
        return Bound(self, wait)

    def abort(self) -> None:
        """End the current waits, and every later one as it begins. Idempotent."""
        self._aborted = True
        self._end_waits()

    def _end_waits(self) -> None:
        for wait in self._waits:
            wait.end()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def is_over(self) -> bool:
        if self.deadline is None:
            return self._aborted
        return self._aborted or now() >= self.deadline.at + (GRACE_S if self._with_engine else 0)

    def _look(self) -> None:
        """Check whether the time is up: runs at the deadline, and again when the engine's grace period has passed."""
        assert self.deadline is not None
        if self.is_over():
            self._end_waits()
        if now() < self.deadline.at + GRACE_S:
            self._timer = asyncio.get_running_loop().call_at(self.deadline.at + GRACE_S, self._look)

    def reason(self) -> Exception:
        """The error that says why the request is over."""
        if self._aborted:
            return aborted()
        assert self.deadline is not None, "only an abort or a deadline ends a wait"
        return self.deadline.exceeded()


class Bound:
    """Ends the waits of one task when its request is over: put `with bound:` around each."""

    def __init__(self, lifecycle: Lifecycle, wait: Wait) -> None:
        self._lifecycle = lifecycle
        self._wait = wait

    def __enter__(self) -> None:
        """Begin a wait.

        Raises, and so does the block:
            EngineError: the deadline has passed.
            ApiError: the request was aborted.
        """
        if self._lifecycle.is_over():
            raise self._lifecycle.reason()
        self._wait.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._wait.__exit__(kind, error, at)
        except WaitEnded:
            raise self._lifecycle.reason() from None


class LiveRequests:
    """Finds the requests that are running by the names that clients and operators know."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Lifecycle]] = {}

    @contextmanager
    def track(self, *names: str) -> Iterator[Lifecycle]:
        """Register a request under each of `names` for the length of the block. Several requests may share a name."""
        lifecycle = Lifecycle()
        for name in names:
            self._by_name.setdefault(name, []).append(lifecycle)
        try:
            yield lifecycle
        finally:
            lifecycle.close()
            for name in names:
                self._by_name[name].remove(lifecycle)
                if not self._by_name[name]:
                    del self._by_name[name]

    def abort(self, name: str) -> int:
        """End all requests of that name, and return how many there were."""
        lifecycles = self._by_name.get(name, ())
        for lifecycle in lifecycles:
            lifecycle.abort()
        return len(lifecycles)

    def abort_all(self) -> None:
        """End all requests."""
        for lifecycles in self._by_name.values():
            for lifecycle in lifecycles:
                lifecycle.abort()
