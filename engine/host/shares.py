"""Owns how engines on one machine share its memory: what each has claimed, and how much the next may take.
Never allocates. A claim is a locked file, so that it ends when its process does, for whatever reason."""

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
"""Share of the memory that stays free: without it the system swaps or kills processes, and Ray ends workers from 95 %
on."""

_LOCK = "lock"

UNKNOWN_TO_OTHERS = "engines that start together on this machine may promise themselves the same memory"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """How many bytes one engine may take: at most `free`, which nobody has claimed, and `share`, its part among all
    engines."""

    free: int
    share: int
    engines: int
    memory: HostMemory
    promised: int = 0
    """Bytes that other engines have claimed but not taken yet."""


class Claim:
    """An engine's claim on memory. It ends with `release`, with this object, or with the process."""

    def __init__(self, path: Path | None, descriptor: int, size: int) -> None:
        self.path = path
        """By which other processes of the engine join; None: nobody knows of this claim."""
        self._descriptor = descriptor
        self._size = size
        self._end = weakref.finalize(self, _end, path, descriptor) if path is not None else None

    def give_back(self, size: int) -> None:
        """Claim `size` bytes less from now on. Not while this thread holds the lock over all claims."""
        assert 0 <= size <= self._size
        self._size -= size
        if self.path is not None and self._end is not None and self._end.alive:
            with shares(self.path.parent):  # nobody reads half of a number
                os.pwrite(self._descriptor, _digits(self._size).encode(), len(f"{os.getpid()} "))

    def release(self) -> None:
        """End the claim. A second call does nothing."""
        if self._end is not None:
            self._end()


def join_claim(path: Path) -> None:
    """Count what this process takes from now on as taken of another process's claim, which counts it already: else it
    would seem promised as well as taken. path: Claim.path, on this machine."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:  # such as one that has been released
        logger.warning("%s: %s", UNKNOWN_TO_OTHERS, error)
        return
    try:
        os.write(descriptor, f" {os.getpid()} {_resident(os.getpid())}".encode())
    finally:
        os.close(descriptor)


def _digits(size: int) -> str:
    """Return a size in as many digits as any other, so that it can be replaced where it stands."""
    return f"{size:020d}"


def _end(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Promise:
    """Bytes that a running engine has claimed, and how many of them its processes have taken."""

    size: int
    taken: int


class Shares:
    """The claims of this user's engines on this machine. Valid while `shares` holds the lock over them."""

    def __init__(self, directory: Path | None) -> None:
        """directory: None if it cannot be made; engines then know nothing of each other."""
        self._directory = directory

    def room(self, engines: int, memory: HostMemory | None = None) -> Room | None:
        """How much one of `engines` engines on this machine may take; None if the system does not say what is free.
        memory: the result of host_memory, if it is known already."""
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
        """Claim `size` bytes for this process, in addition to what it has now."""
        if self._directory is None:
            return Claim(None, -1, size)
        path = self._directory / uuid.uuid4().hex
        try:
            return Claim(path, _write(path, f"{os.getpid()} {_digits(size)} {_resident(os.getpid())}"), size)
        except OSError as error:
            logger.warning("%s: %s", UNKNOWN_TO_OTHERS, error)
            return Claim(None, -1, size)

    def _promises(self) -> list[_Promise]:
        paths = [] if self._directory is None else sorted(self._directory.iterdir())
        return [promise for path in paths if path.name != _LOCK and (promise := _read(path)) is not None]


@contextmanager
def shares(directory: Path | None = None) -> Iterator[Shares]:
    """Hold the lock over all claims. Claim what `room` allows before the lock ends. directory: None means this user's
    own."""
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
    """Open and lock a file. The lock ends when the descriptor is closed.

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
    """Make a locked file with this text.

    Raises:
        OSError: it could not be made; no file is left.
    """
    descriptor = _locked(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    except OSError:
        _end(path, descriptor)
        raise
    return descriptor


def _read(path: Path) -> _Promise | None:
    """Read a claim. None if the process that held its lock has ended; the file is then removed."""
    with suppress(FileNotFoundError), path.open("rb") as file:  # it may be released meanwhile
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return None
        process, size, before, *others = map(int, file.read().split())
        pairs = [(process, before), *zip(others[::2], others[1::2], strict=True)]
        return _Promise(size, min(size, sum(max(0, _resident(one) - had) for one, had in pairs)))
    return None


def _resident(process: int) -> int:
    """Anonymous memory of a process; 0 if the process is not visible from here, as from another container."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
