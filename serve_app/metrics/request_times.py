"""Owns when one request of an ingress replica was where: at the gate, with the engines, at its first token.
Never counts anything; the recorder does, at the request's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RequestTimes:
    """Made when the request arrives. Times are those of the event loop's clock."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.arrived = self.now()
        self.deadline_at: float | None = None
        self.first_token: float | None = None
        self.gate_s = 0.0
        self.num_choices = 1
        self._num_open = 0  # answers that are not whole
        self._given: float | None = None
        self._returned: float | None = None

    @contextmanager
    def at_gate(self) -> Iterator[None]:
        """Round the wait for a place with the engines."""
        begun = self.now()
        try:
            yield
        finally:
            self.gate_s += self.now() - begun

    def expects(self) -> None:
        """An answer is asked for; a request may ask for several, and they need not begin at once."""
        self._num_open += 1

    def given_to_engine(self) -> None:
        if self._given is None:
            self._given = self.now()

    def has_token(self) -> None:
        """A piece of the answer with a token was taken, which in a stream means sent. Idempotent."""
        if self.first_token is None:
            self.first_token = self.now()

    def returned(self) -> None:
        """An engine has given the whole of an answer."""
        self._num_open -= 1
        self._returned = self.now()

    @property
    def is_answered(self) -> bool:
        """Every answer that was expected is whole."""
        return self._returned is not None and not self._num_open

    @property
    def engine_s(self) -> float:
        """Seconds with the engines, from the first given to the last returned; only of an answered request."""
        assert self._given is not None
        assert self._returned is not None
        return self._returned - self._given

    def missed_deadline(self) -> bool:
        """Whether the answer was not whole when its deadline passed."""
        done = self._returned if self.is_answered else None
        return self.deadline_at is not None and (self.now() if done is None else done) >= self.deadline_at
