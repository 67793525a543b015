"""Starts a replica's watchdog process, and feeds it from the event loop that serves.
Never decides that a replica hangs: the other process does, when it gets nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from serve_app.replicas import watchdog_process

logger = logging.getLogger(__name__)

FEED_S = 0.5


class Watchdog:
    """Feeds the process; must be used on the event loop on which it was made. A replica does not feed it, and is
    killed, if its loop stands still, if the process is stopped, or if the interpreter lock is held."""

    def __init__(self, most_silent_s: float, is_well: Callable[[], bool] = lambda: True) -> None:
        """`is_well`: the watchdog is only fed while this returns true. It must not block."""
        self._is_well = is_well
        script = str(Path(watchdog_process.__file__))
        command = [sys.executable, "-I", "-S", script, str(os.getpid()), str(most_silent_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._feeding = asyncio.ensure_future(self._feed())

    async def _feed(self) -> None:
        try:
            while True:
                if self._is_well():
                    with suppress(BlockingIOError):  # the process is stopped, and its pipe is full
                        os.write(self._pipe, b".")
                await asyncio.sleep(FEED_S)
        except BrokenPipeError:
            logger.warning("the watchdog of this process has ended: if the process hangs, it will not be killed")

    def end(self) -> None:
        """End the watchdog, for a process that continues without it. Idempotent."""
        self._feeding.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
