"""Owns how long each request of this ingress replica may go on: until its deadline, or until somebody aborts it.
Never asks an engine: whoever waits on behalf of a request learns it here, and lets go of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from serve_app.api.http.wait import Wait, WaitEnded
from serve_app.api.requests.deadline import GRACE_S, Deadline, now
from serve_app.errors.api_error import aborted


class Life:
    """One request's. There is one timer for all of its waits."""

    def __init__(self) -> None:
        self.deadline: Deadline | None = None
        self._with_engine = False
        self._waits: list[Wait] = []
        self._aborted = False
        self._timer: asyncio.TimerHandle | None = None

    def until(self, deadline: Deadline | None) -> None:
        """Set the deadline, once the request has been read."""
        self.deadline = deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline.at, self._look)

    def given_to_engine(self) -> None:
        """From now on the engine ends it at its deadline, and has a little longer for that."""
        self._with_engine = True

    def bound(self) -> Bound:
        """What bounds the waits of one task."""
        wait = Wait()
        self._waits.append(wait)
        return Bound(self, wait)

    def abort(self) -> None:
        """End the waits that are going on, and those that come. Idempotent."""
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
        """The time may be up: at the deadline, and again when the engine's little longer has passed."""
        assert self.deadline is not None
        if self.is_over():
            self._end_waits()
        if now() < self.deadline.at + GRACE_S:
            self._timer = asyncio.get_running_loop().call_at(self.deadline.at + GRACE_S, self._look)

    def reason(self) -> Exception:
        """Why it is over."""
        if self._aborted:
            return aborted()
        assert self.deadline is not None, "nobody else ends a wait"
        return self.deadline.exceeded()


class Bound:
    """`with bound:` around each wait of one task ends it with its life."""

    def __init__(self, life: Life, wait: Wait) -> None:
        self._life = life
        self._wait = wait

    def __enter__(self) -> None:
        """Begin a wait.

        Raises, and so does the block:
            EngineError: the deadline has passed.
            ApiError: the request was aborted.
        """
        if self._life.is_over():
            raise self._life.reason()
        self._wait.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._wait.__exit__(kind, error, at)
        except WaitEnded:
            raise self._life.reason() from None


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
            life.close()
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
