"""Owns threads that run jobs in order, and the promise that no job is lost, whatever ends a thread.
Never keeps a process alive: the threads are daemons, since a disk may not answer."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

J = TypeVar("J")


class Worker(Generic[J]):
    """A queue of jobs and the threads that take them, first come, first served."""

    def __init__(
        self,
        name: str,
        run: Callable[[list[J]], None],
        fail: Callable[[Sequence[J], str], None],
        *,
        threads: int = 1,
        batch: int = 1,
    ) -> None:
        """run: runs up to `batch` jobs. fail: ends jobs that `run` did not, with the reason; it must do nothing to
        those that have ended, and not raise."""
        self._run, self._fail, self._batch = run, fail, batch
        self._jobs: OrderedDict[int, J] = OrderedDict()
        self._changed = Condition()
        self._open, self._alive = True, threads
        self._threads = [Thread(target=self._main, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, job: J) -> None:
        """Queue a job under a unique key. It fails at once if no thread is left to run it."""
        with self._changed:
            if takes := self._open and self._alive > 0:
                self._jobs[key] = job
                self._changed.notify()
        if not takes:
            self._fail([job], "the tier's thread has ended")

    def take_back(self, key: int) -> J | None:
        """Return a job that no thread has taken yet, and forget it; None otherwise."""
        with self._changed:
            return self._jobs.pop(key, None)

    def take_all_back(self) -> list[J]:
        """Return all jobs that no thread has taken yet, and forget them."""
        with self._changed:
            jobs = [*self._jobs.values()]
            self._jobs.clear()
            return jobs

    def close(self) -> None:
        """Take no further jobs. Threads end once those in the queue have run."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Wait for the threads until `deadline_s` on the monotonic clock. Return whether all have ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _main(self) -> None:
        jobs: list[J] = []
        try:
            while jobs := self._next():
                try:
                    self._run(jobs)
                except Exception as error:
                    logger.exception("a move of KV failed")
                    self._fail(jobs, f"{type(error).__name__}: {error}")
        finally:  # whatever else ends the thread
            with self._changed:
                self._alive -= 1
                if not self._alive:
                    jobs += self._jobs.values()
                    self._jobs.clear()
            self._fail(jobs, "the tier's thread has ended")

    def _next(self) -> list[J]:
        """Wait for jobs. Return none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or not self._open)
            count = min(self._batch, len(self._jobs))
            return [self._jobs.popitem(last=False)[1] for _ in range(count)]
