"""Owns the watchdog of a replica: it starts the process, and feeds it from the event loop that serves.
Never decides that a replica hangs: the other process does, when nothing comes."""

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
    """Belongs to the event loop it was made on. A replica whose loop stands still, or which is stopped, or holds its
    interpreter lock, does not feed it, and is killed."""

    def __init__(self, most_silent_s: float, is_well: Callable[[], bool] = lambda: True) -> None:
        """`is_well`: while this says no, the watchdog is not fed. It must not block."""
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
                    with suppress(BlockingIOError):  # it is stopped, and has enough to read
                        os.write(self._pipe, b".")
                await asyncio.sleep(FEED_S)
        except BrokenPipeError:
            logger.warning("the watchdog of this process has ended: if the process hangs, nobody kills it")

    def end(self) -> None:
        """To be called where the process goes on without it: the watchdog ends as soon as it sees that. Idempotent."""
        self._feeding.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
