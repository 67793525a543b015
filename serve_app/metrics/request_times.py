"""Records the times of one request in an ingress replica: at the gate, with the engines, at its first token.
Never counts anything: the recorder does, at the request's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class RequestTimes:
    """Must be made when the request arrives. All times are on the event loop's clock. Thousands are kept after their
    requests."""

    __slots__ = (
        *("now", "arrived", "read_at", "gate_waits", "gate_s", "given", "scheduled", "first_token", "returned_at"),
        *("unread_s", "deadline_at", "num_choices", "_num_open"),
    )

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.arrived = self.now()
        self.deadline_at: float | None = None
        self.first_token: float | None = None
        self.gate_waits: tuple[tuple[float, float], ...] = ()
        """The begin and the end of each wait there. For a model that may sleep there are two: until it is known how to
        read the request, and until that has a place."""
        self.gate_s = 0.0
        """Their sum."""
        self.given: float | None = None
        self.scheduled: float | None = None
        self.returned_at: float | None = None
        """When an engine last completed an answer."""
        self.num_choices = 1
        self.read_at: float | None = None
        """When the body was read."""
        self.unread_s = 0.0
        """How long sending has waited for the client."""
        self._num_open = 0  # answers that are not complete

    @contextmanager
    def at_gate(self) -> Iterator[None]:
        """Measure a wait for a place with the engines: put it around the wait."""
        begun = self.now()
        try:
            yield
        finally:
            ended = self.now()
            self.gate_waits += ((begun, ended),)
            self.gate_s += ended - begun

    def has_body(self) -> None:
        self.read_at = self.now()

    async def send(self, send: Callable[[T], Awaitable[None]], message: T) -> None:
        """Send a part of the answer, and note how long the client kept it waiting."""
        begun = self.now()
        try:
            await send(message)
        finally:
            self.unread_s += self.now() - begun

    def expects(self) -> None:
        """Note that an answer is expected. A request may have several, which need not begin at the same time."""
        self._num_open += 1

    def given_to_engine(self) -> None:
        if self.given is None:
            self.given = self.now()

    def has_begun(self) -> None:
        """Note that an engine has begun to compute the prompt. Idempotent."""
        if self.scheduled is None:
            self.scheduled = self.now()

    def has_token(self) -> None:
        """Note that a piece with a token was taken, which in a stream means that it was sent. Idempotent."""
        if self.first_token is None:
            self.first_token = self.now()

    def returned(self) -> None:
        """Note that an engine has completed an answer."""
        self._num_open -= 1
        self.returned_at = self.now()

    @property
    def is_answered(self) -> bool:
        """Whether every expected answer is complete."""
        return self.returned_at is not None and not self._num_open

    @property
    def engine_s(self) -> float:
        """The seconds from the first submission to the last completed answer; only for an answered request."""
        assert self.given is not None
        assert self.returned_at is not None
        return self.returned_at - self.given

    def missed_deadline(self) -> bool:
        """Whether the answer was incomplete when its deadline passed."""
        done = self.returned_at if self.is_answered else None
        return self.deadline_at is not None and (self.now() if done is None else done) >= self.deadline_at
