"""Owns the lock over a directory that engines share, and the number of bytes in it, which the lock's file holds.
Never waits without an end: a process that was stopped while it had the lock costs others their stores, and no more."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_S = 2.0
"""How long to wait for the lock. Whoever has it counts or removes files, which takes milliseconds."""

_RETRY_S = 0.002
_DIGITS = 20

_PAGE = 4096


def on_disk(size: int) -> int:
    """Return how many bytes a file of this size takes: whole pages."""
    return -(-size // _PAGE) * _PAGE


class Ledger:
    """A lock among processes and threads. Its holder may read and write the count.

    The count is never below what the files take, as long as whoever adds a file enters it first, and whoever removes
    one does so as the holder. It may be above it, after a crash: whoever finds no room counts anew.
    """

    def __init__(self, path: Path) -> None:
        """path: of the lock's file. It is made at first use."""
        self._path = path
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self.last = 0
        """The count when it was last seen."""

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock. timeout_s: None means LOCK_S.

        Raises:
            TimeoutError: others have held it all the time.
            OSError: its file cannot be opened or locked.
        """
        timeout_s = LOCK_S if timeout_s is None else timeout_s
        end = time.monotonic() + timeout_s
        if not self._mutex.acquire(timeout=timeout_s):
            raise self._timeout(timeout_s)
        try:
            descriptor = self._locked(end, timeout_s)
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def read(self) -> int | None:
        """Return the count, for the holder. None if there is none."""
        assert self._descriptor is not None
        text = os.pread(self._descriptor, _DIGITS + 1, 0)
        if len(text) != _DIGITS + 1 or not text.strip().isdigit():
            return None
        self.last = int(text)
        return self.last

    def write(self, used: int) -> None:
        """Enter the count, for the holder."""
        assert self._descriptor is not None
        os.pwrite(self._descriptor, f"{used:0{_DIGITS}d}\n".encode(), 0)
        self.last = used

    def add(self, change: int) -> None:
        """Change the count, for the holder; without one, nothing is to be changed."""
        used = self.read()
        if used is not None:
            self.write(max(0, used + change))

    def look(self) -> None:
        """Update `last` without the lock."""
        with suppress(OSError, ValueError):
            self.last = int(self._path.read_text(encoding="ascii"))

    def close(self) -> None:
        with self._mutex:
            self._close()

    def _locked(self, end: float, timeout_s: float) -> int:
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise self._timeout(timeout_s) from None
                time.sleep(_RETRY_S)
                continue
            if self._is_there(descriptor):
                return descriptor
            self._close()  # somebody removed the file: a lock on it excludes nobody

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return self._descriptor

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _timeout(self, timeout_s: float) -> TimeoutError:
        return TimeoutError(f"{self._path} has been locked by another process for {timeout_s:g} s")
