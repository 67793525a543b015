"""Owns how long each request of this ingress replica may go on: until its deadline, or until somebody aborts it.
Never asks an engine: whoever waits on behalf of a request learns it here, and lets go of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from serve_app.deadline import Deadline
from serve_app.errors import aborted

Result = TypeVar("Result")


class Life:
    """One request's. `deadline` is set once the request has been read."""

    def __init__(self) -> None:
        self.deadline: Deadline | None = None
        self._aborted = False
        self._wait: asyncio.Timeout | None = None

    def abort(self) -> None:
        """End the wait that is going on, or the next. Idempotent."""
        self._aborted = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(0)

    async def wait_for(self, awaitable: Awaitable[Result], grace_s: float = 0.0) -> Result:
        """Wait no longer than the request may go on, and `grace_s` seconds for whoever ends it at its deadline.

        Raises:
            EngineError: the deadline has passed.
            ApiError: the request was aborted.
        """
        at = None if self.deadline is None else self.deadline.at + grace_s
        try:
            async with asyncio.timeout_at(at) as wait:
                self._wait = wait
                if self._aborted:
                    wait.reschedule(0)
                result = await awaitable
        except TimeoutError:
            if not wait.expired():  # somebody else's
                raise
            raise self._end() from None
        finally:
            self._wait = None
        if self._aborted:  # what is there at once needs no wait that could be ended
            raise aborted()
        return result

    def _end(self) -> Exception:
        if self._aborted:
            return aborted()
        assert self.deadline is not None, "nobody else ends a wait"
        return self.deadline.exceeded()


class LiveRequests:
    """The lives that go on, by the names that clients and operators know them by."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Life]] = {}

    @contextmanager
    def track(self, *names: str) -> Iterator[Life]:
        """A life under each of `names`, which several requests may share, as long as the block."""
        life = Life()
        for name in names:
            self._by_name.setdefault(name, []).append(life)
        try:
            yield life
        finally:
            for name in names:
                self._by_name[name].remove(life)
                if not self._by_name[name]:
                    del self._by_name[name]

    def abort(self, name: str) -> int:
        """End all requests of that name; how many there were."""
        lives = self._by_name.get(name, ())
        for life in lives:
            life.abort()
        return len(lives)
