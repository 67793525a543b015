"""Reads a request's deadline, and says how much time is left until it.
Never ends a request: the engine does when the time is up, or the task that waits for an engine that does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.protocol import EngineError, ErrorCode
from serve_app.errors.api_error import ApiError, clip

HEADER = "Request-Timeout-Ms"
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
GRACE_S = 1.0
"""How long to wait for the engine to end a late request by itself, before assuming that it cannot."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline, counted from the arrival of the request: reading and tokenizing it take part of its time."""

    timeout_ms: int
    at: float
    """A time on the event loop's clock."""

    def left_s(self) -> float:
        """Return the seconds that are left for the engine.

        Raises:
            EngineError: the time is up.
        """
        left = self.at - now()
        if left <= 0:
            raise self.exceeded()
        return left

    @property
    def has_passed(self) -> bool:
        return now() >= self.at

    def exceeded(self) -> EngineError:
        text = f"The request was ended after {self.timeout_ms / 1000:g} s, as its deadline says."
        return EngineError(ErrorCode.DEADLINE_EXCEEDED, text)


def now() -> float:
    return asyncio.get_running_loop().time()


def deadline_of(arrived: float, header: str | None, timeout_ms: int | None) -> Deadline | None:
    """Make the deadline from the sooner of the header and the field; None if the client gave neither.

    Raises:
        ApiError: 400, the header is not a valid number of milliseconds.
    """
    timeouts = [value for value in (timeout_ms, _read(header)) if value is not None]
    return Deadline(min(timeouts), arrived + min(timeouts) / 1000) if timeouts else None


def _read(header: str | None) -> int | None:
    if header is None:
        return None
    digits = header.strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= 18 and 1 <= int(digits) <= MAX_TIMEOUT_MS:
        return int(digits)
    text = (
        f"{HEADER} should be milliseconds, a whole number from 1 to {MAX_TIMEOUT_MS}, but it is {clip(header, 50)!r}."
    )
    raise ApiError(400, text, param=HEADER, code="invalid_value")
