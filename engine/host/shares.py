"""Owns how engines on one machine share its memory: what each has promised itself, and what the next may take.
Never allocates. A promise is a locked file, so that it ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import logging
import os
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.host.memory import HostMemory, host_memory
from engine.host.own_directory import own_directory

SPARED = 0.05
"""Share of the memory that stays free: without any a system swaps or kills, and Ray ends workers from 95 % on."""

_LOCK = "lock"

UNKNOWN_TO_OTHERS = "engines that start together on this machine may promise themselves the same memory"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that one engine may take: of what is free and promised to nobody, and as its share among all engines."""

    free: int
    share: int
    engines: int
    memory: HostMemory
    promised: int = 0
    """To engines that have not taken all of it yet."""


class Claim:
    """What an engine has promised itself. It ends with `release`, with this object, or with the process."""

    def __init__(self, path: Path | None, descriptor: int) -> None:
        self._end = weakref.finalize(self, _end, path, descriptor) if path is not None else None

    def release(self) -> None:
        """A second call does nothing."""
        if self._end is not None:
            self._end()


def _end(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Promise:
    """What a living engine has promised itself, and how much of it its process has taken. Bytes."""

    size: int
    taken: int


class Shares:
    """The promises of this user's engines on this machine, while nobody else reads or writes them."""

    def __init__(self, directory: Path | None) -> None:
        """directory: None where there can be none; engines then know nothing of each other."""
        self._directory = directory

    def room(self, engines: int, memory: HostMemory | None = None) -> Room | None:
        """What one of `engines` engines on this machine may take; None where the system does not say what is free.
        memory: as it was found already."""
        memory = memory or host_memory()
        if memory is None:
            return None
        others = self._promises()
        spared, taken = int(memory.total * SPARED), sum(other.taken for other in others)
        promised = sum(other.size - other.taken for other in others)
        engines = max(engines, len(others) + 1)
        return Room(
            free=max(0, memory.free - spared - promised),
            share=max(0, memory.free + taken - spared) // engines,
            engines=engines,
            memory=memory,
            promised=promised,
        )

    def claim(self, size: int) -> Claim:
        """Promise `size` bytes to this process, besides what it has."""
        if self._directory is None:
            return Claim(None, -1)
        path = self._directory / uuid.uuid4().hex
        try:
            return Claim(path, _write(path, f"{os.getpid()} {size} {_resident(os.getpid())}"))
        except OSError as error:
            logger.warning("%s: %s", UNKNOWN_TO_OTHERS, error)
            return Claim(None, -1)

    def _promises(self) -> list[_Promise]:
        paths = [] if self._directory is None else sorted(self._directory.iterdir())
        return [promise for path in paths if path.name != _LOCK and (promise := _read(path)) is not None]


@contextmanager
def shares(directory: Path | None = None) -> Iterator[Shares]:
    """Hold the lock over all promises. What is decided by `room` is to be claimed before it ends.
    directory: None means this user's own."""
    try:
        directory = directory or own_directory("chunkserve-memory")
        lock = _locked(directory / _LOCK, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        logger.warning("%s: %s", UNKNOWN_TO_OTHERS, error)
        yield Shares(None)
        return
    try:
        yield Shares(directory)
    finally:
        os.close(lock)


def _locked(path: Path, flags: int) -> int:
    """The descriptor of a file that this process has locked; the lock ends with it.

    Raises:
        OSError: it cannot be opened or locked.
    """
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write(path: Path, text: str) -> int:
    """A new locked file with this text.

    Raises:
        OSError: there is none now.
    """
    descriptor = _locked(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    except OSError:
        _end(path, descriptor)
        raise
    return descriptor


def _read(path: Path) -> _Promise | None:
    """None, and the file is removed, where the process that held its lock has ended."""
    with suppress(FileNotFoundError), path.open("rb") as file:  # it may be released meanwhile
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return None
        process, size, before = map(int, file.read().split())
        return _Promise(size, min(size, max(0, _resident(process) - before)))
    return None


def _resident(process: int) -> int:
    """Anonymous memory of a process; 0 where it is not seen from here, as from another container."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
