"""Limits how slowly a request's body may arrive.
Never reads a body."""

from __future__ import annotations

import asyncio
from types import TracebackType

from serve_app.edge.limits import BODY_STALL_S, MIN_BODY_BYTES_PER_S


class BodyPace:
    """Raises TimeoutError if a body arrives too slowly: put `async with pace:` around the reading."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._limit = asyncio.timeout_at(self._begun + BODY_STALL_S)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._limit.__aexit__(kind, error, at)  # never suppresses the exception

    def received(self, num_bytes: int) -> None:
        """Note that `num_bytes` have arrived so far, and that more are to come."""
        on_average = self._begun + BODY_STALL_S + num_bytes / MIN_BODY_BYTES_PER_S
        self._limit.reschedule(min(self._loop.time() + BODY_STALL_S, on_average))
