"""Owns the choice between the event loop and a thread for work whose time grows with a request's size.
Never moves small work: most requests take less time than the hop to a thread and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

INLINE_SIZE = 4096
"""Bytes or characters: about a millisecond of parsing or encoding, ten times a hop."""
LARGE_SIZE = 2**19
"""From here on, work waits for one of a few threads: it takes a tenth of a second to seconds of a core."""
MAX_LARGE = 4

Result = TypeVar("Result")

# Threads that encode take cores, and threads of Python take the interpreter lock in turn: each of them is a turn that
# the event loop waits for after every system call.
_large = ThreadPoolExecutor(
    max(1, min(MAX_LARGE, len(os.sched_getaffinity(0)) // 2)), thread_name_prefix="large-request"
)


async def run_sized(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread if `size` is large, so that a long prompt does not stall everybody's streams. Work for
    somebody who has left is not begun."""
    if size <= INLINE_SIZE:
        return work()
    if size < LARGE_SIZE:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_large, copy_context().run, work)
