"""Runs work on the event loop or in a thread, depending on the size of the request. Tenants take turns at the threads.
Never moves small work: most requests take less time than the hop to a thread and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakKeyDictionary

from serve_app.api.http.turns import TenantTurns

INLINE_SIZE = 4096
"""In bytes or characters: parsing or encoding as many takes about a millisecond, ten times as long as the hop."""
LARGE_SIZE = 2**19
"""Work of this size or more waits for one of a few threads: it takes a core for a tenth of a second to seconds."""
MAX_LARGE = 4
MAX_DECODED = 2
"""The number of images that are decoded at a time, and so in memory, where each has three bytes per pixel."""

Result = TypeVar("Result")

_tenant: ContextVar[str] = ContextVar("tenant", default="")


class _Threads:
    """The threads of one event loop."""

    def __init__(self) -> None:
        num_cores = len(os.sched_getaffinity(0))
        self.medium = TenantTurns(min(32, num_cores + 4), "medium-request")
        # Threads that encode occupy cores, and Python threads take turns at the interpreter lock: each further thread
        # is a turn for which the event loop waits after every system call.
        self.large = TenantTurns(max(1, min(MAX_LARGE, num_cores // 2)), "large-request")
        self.images = TenantTurns(MAX_DECODED, "image-decoder")


_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = WeakKeyDictionary()


@contextmanager
def work_of(tenant: str) -> Iterator[None]:
    """Let work that is run within the block take the tenant's turns."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def part_size(size: int, whole: int) -> int:
    """Return the size to run one of several parts with. Small parts of large work leave the event loop, too: it would
    stand still for all of them together."""
    return size if whole <= INLINE_SIZE else max(size, INLINE_SIZE + 1)


async def run_sized(size: int, work: Callable[[], Result]) -> Result:
    """Run `work`, in a thread if `size` is large, so that a long prompt does not stall all other streams. Work that is
    cancelled while it waits for a thread is not begun."""
    if size <= INLINE_SIZE:
        return work()
    threads = _threads()
    turns = threads.medium if size < LARGE_SIZE else threads.large
    return await turns.run(_tenant.get(), work)


async def run_decoder(work: Callable[[], Result]) -> Result:
    """Run the decoding of one image in a thread, as `run_sized` does."""
    return await _threads().images.run(_tenant.get(), work)


def _threads() -> _Threads:
    loop = asyncio.get_running_loop()
    return _of_loop.get(loop) or _of_loop.setdefault(loop, _Threads())
