"""Owns waits that somebody else may end: what asyncio.timeout does for one await, for the thousands of one request.
Never arms a timer of its own; entering and leaving costs well under a microsecond, asyncio.timeout four."""

from __future__ import annotations

import asyncio
from types import TracebackType


class WaitEnded(Exception):
    """Somebody ended the wait."""


class Wait:
    """`with wait:` around an await makes it one that `end` ends. One task at a time; not reentrant."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()  # asked for once: in Python 3.11 it costs a system call
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._ended = False

    @property
    def is_on(self) -> bool:
        return self._task is not None

    def end(self) -> None:
        """Have the block that is being waited in raise WaitEnded; nothing where there is none."""
        if self._task is not None and not self._ended:
            self._ended = True
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task(self._loop)
        assert task is not None
        self._num_cancels = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._ended:
            self._ended = False
            assert task is not None
            # Somebody who cancels the task at the same moment must not be taken for us.
            if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
                raise WaitEnded from error
