"""Lets another task end a wait, like asyncio.timeout does, but cheaply enough for the thousands of waits of a request.
Never arms a timer of its own. Entering and leaving take well under a microsecond; asyncio.timeout takes four."""

from __future__ import annotations

import asyncio
from types import TracebackType


class WaitEnded(Exception):
    """The wait was ended by a call of `end`."""


class Wait:
    """Lets `end` end an await: put `with wait:` around it. One task at a time; not reentrant."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()  # asked for once: in Python 3.11 it costs a system call
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._ended = False

    @property
    def is_on(self) -> bool:
        return self._task is not None

    def end(self) -> None:
        """Make the block that is waiting raise WaitEnded; does nothing if none is."""
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
            # If somebody else cancelled the task at the same moment, let that cancellation through.
            if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
                raise WaitEnded from error
