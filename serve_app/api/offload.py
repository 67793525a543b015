"""Owns the choice between the event loop and a thread for work whose time grows with a request's size.
Never moves small work: most requests take less time than the hop to a thread and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

INLINE_SIZE = 4096
"""Bytes or characters: about a millisecond of parsing or encoding, ten times a hop."""

Result = TypeVar("Result")


async def run_sized(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread if `size` is large, so that a long prompt does not stall everybody's streams."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)
