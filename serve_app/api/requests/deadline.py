"""Owns a request's deadline: how a client asks for one, and how much of it is left at any moment.
Never ends a request: the engine does when the time is up, and whoever waits for an engine that does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.protocol import EngineError, ErrorCode
from serve_app.errors.api_error import ApiError, clip

HEADER = "Request-Timeout-Ms"
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
GRACE_S = 1.0
"""The engine ends a late request by itself; after this long, it is taken for one that cannot."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Counted from the arrival of the request: reading and tokenizing it are part of its time."""

    timeout_ms: int
    at: float
    """On the event loop's clock."""

    def left_s(self) -> float:
        """Seconds for the engine.

        Raises:
            EngineError: the time is up.
        """
        left = self.at - now()
        if left <= 0:
            raise self.exceeded()
        return left

    def exceeded(self) -> EngineError:
        text = f"The request was ended after {self.timeout_ms / 1000:g} s, as its deadline says."
        return EngineError(ErrorCode.DEADLINE_EXCEEDED, text)


def now() -> float:
    return asyncio.get_running_loop().time()


def deadline_of(arrived: float, header: str | None, timeout_ms: int | None) -> Deadline | None:
    """The sooner of the two that a client may ask for; None if it asked for none.

    Raises:
        ApiError: 400, the header is no number of milliseconds.
    """
    asked = [value for value in (timeout_ms, _read(header)) if value is not None]
    return Deadline(min(asked), arrived + min(asked) / 1000) if asked else None


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
