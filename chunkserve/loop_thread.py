"""Owns an event loop in a thread of its own, for callers that have none, or one that must not be blocked.
Never runs an engine's steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from chunkserve.errors import closed, of_another_process

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for any thread until `stop`. The thread ends with the process at the latest."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_open, self._pid = True, os.getpid()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._lock = threading.RLock()  # the garbage collector may submit work while this very thread does
        self._thread = threading.Thread(target=self._run, name="chunkserve-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        if self._last is not None:
            self._loop.run_until_complete(self._last())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. Whatever interrupts the wait, such as Ctrl-C, cancels it.

        Raises:
            RequestFailed: the thread was stopped.
            Exception: what the coroutine raises.
        """
        future = self._submitted(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed() from None
        except BaseException:
            future.cancel()
            raise

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that cleans up. Returns when it has ended, except on this very thread, which cannot wait for
        itself: the garbage collector closes what was abandoned wherever it runs."""
        if threading.current_thread() is self._thread:
            self._submitted(work)
        else:
            self.call(work)

    def _submitted(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        if os.getpid() != self._pid:  # the thread was left behind at the fork
            work.close()
            raise of_another_process()
        with self._lock:  # what is submitted before `stop` is seen before it; later, nobody would ever answer
            if self._is_open:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise closed()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what runs, and end the thread. `last`: makes what the thread still runs when all else has ended.
        Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_open:
                self._is_open, self._last = False, last
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
