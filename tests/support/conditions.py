"""Owns the wait for what another task or thread brings about, in a test's event loop.
Never waits for a time: it ends once the condition is true, and fails if that never happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TIMEOUT_S = 30
"""Only ever reached by a failure."""
_PAUSE_S = 0.001


async def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(_PAUSE_S)
