"""Owns the threads for work that takes a core for up to seconds, such as checking a grammar, and who is next.
Never lets the requests of one tenant make those of another wait for more than one of them."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

CORES_EACH = 4
"""One thread for so many cores: steps and streams need the others. Two checks beside a step on two cores delayed other
streams by 300 ms, four by 700 ms, one by less than 200 ms."""

Result = TypeVar("Result")


class TenantTurns:
    """Tenants take turns, and the requests of one tenant are served in their order. One event loop may use it."""

    def __init__(self, num_threads: int | None = None, name: str = "tenant-turns") -> None:
        """`num_threads`: None for one for each CORES_EACH cores. `name`: the threads'."""
        self._idle = num_threads or max(1, len(os.sched_getaffinity(0)) // CORES_EACH)
        self._threads = ThreadPoolExecutor(self._idle, thread_name_prefix=name)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread when it is the tenant's turn. Work that is cancelled while it waits is not begun."""
        await self._turn(tenant)
        loop = asyncio.get_running_loop()
        running = self._threads.submit(copy_context().run, work)
        running.add_done_callback(lambda _: self._end(loop))  # if the request is cancelled, its thread is still busy
        try:
            return await asyncio.wrap_future(running)
        finally:
            del running  # an error would otherwise hold this frame, which holds the error

    async def _turn(self, tenant: str) -> None:
        if self._idle:
            self._idle -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():
                self._pass_on()  # it was its turn already
            raise

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            following = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all others
            if not following.done():
                following.set_result(None)
                return
        self._idle += 1
