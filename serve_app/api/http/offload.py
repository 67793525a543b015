"""Runs work on the event loop or in a thread, depending on the size of the request.
Never moves small work: most requests take less time than the hop to a thread and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

INLINE_SIZE = 4096
"""In bytes or characters: parsing or encoding as many takes about a millisecond, ten times as long as the hop."""
LARGE_SIZE = 2**19
"""Work of this size or more waits for one of a few threads: it takes a core for a tenth of a second to seconds."""
MAX_LARGE = 4

Result = TypeVar("Result")

# Threads that encode occupy cores, and Python threads take turns at the interpreter lock: each further thread is a turn
# for which the event loop waits after every system call.
_large = ThreadPoolExecutor(
    max(1, min(MAX_LARGE, len(os.sched_getaffinity(0)) // 2)), thread_name_prefix="large-request"
)


async def run_sized(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread if `size` is large, so that a long prompt does not stall all other streams. Large work
    that is cancelled while it waits for a thread is not begun."""
    if size <= INLINE_SIZE:
        return work()
    if size < LARGE_SIZE:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_large, copy_context().run, work)
