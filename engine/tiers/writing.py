"""Owns the directory of files that are being written, and knows which of their writers have ended.
Never renames one: whoever wrote it does. What a killed engine left here is removed."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from engine.tiers.ledger import on_disk

_TOKEN = re.compile(r"[0-9a-f]{32}")


class Writing:
    """`<token>` is a file that its engine keeps locked; `<token>.<number>.<size>` are files that it is writing. Process
    ids would not do: engines in several containers may share a directory.

    Whoever enters or sweeps holds the ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._descriptor: int | None = None

    def is_in(self) -> bool:
        """Return whether this engine's token is there."""
        return self._descriptor is not None and (self.path / self._token).exists()

    def enter(self) -> None:
        """Make the directory and this engine's token.

        Raises:
            OSError: they cannot be made.
        """
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.leave()
        self._descriptor = os.open(self.path / self._token, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def create(self, size: int) -> tuple[int, Path]:
        """Make a file for `size` bytes. Return its descriptor and path.

        Raises:
            OSError: it cannot be made.
        """
        path = self.path / f"{self._token}.{next(self._numbers)}.{size}"
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), path

    def num_bytes(self) -> int:
        """Return what all files here take when they are whole."""
        sizes = [name.rpartition(".")[2] for name in self._names() if "." in name]
        return sum(on_disk(int(size)) for size in sizes if size.isdigit())

    def sweep(self) -> None:
        """Remove the files of engines that have ended."""
        names = self._names()
        tokens = {name.partition(".")[0] for name in names} - {self._token}
        dead = {token for token in sorted(tokens) if self._has_ended(token)}
        for name in names:
            if name.partition(".")[0] in dead:
                (self.path / name).unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove this engine's token."""
        if self._descriptor is not None:
            with suppress(OSError):  # the next sweep removes it
                (self.path / self._token).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _names(self) -> list[str]:
        """List what engines made. File systems and desktops put files of their own into any directory."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [name for name in names if _TOKEN.fullmatch(name.partition(".")[0])]

    def _has_ended(self, token: str) -> bool:
        try:
            descriptor = os.open(self.path / token, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
