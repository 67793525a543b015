"""Owns how files come into the disk tier's directory and leave it: room for them, their count, and their names.
Never looks into a block, and never writes where a reader could see half of one."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engine.tiers.block_file import write_all
from engine.tiers.disk_index import Index, Space
from engine.tiers.faults import TierFault
from engine.tiers.ledger import Ledger, on_disk
from engine.tiers.private_directory import make_private
from engine.tiers.writing import Writing

_ROOM = 32
"""Where there is no room, files that take one part in so many of the capacity leave at once."""
_EVICT_S = 0.1
"""How long they may take: other engines wait for the lock meanwhile."""

logger = logging.getLogger(__name__)


class DiskWriter:
    """Usable on any number of threads at once, as other processes use the same directory."""

    def __init__(self, root: Path, *, capacity_bytes: int, file_bytes: int) -> None:
        """root: the directory of a version. capacity_bytes: the most that all files take. file_bytes: length of each
        that is written here."""
        self._root, self._capacity = root, capacity_bytes
        self._length, self._size = file_bytes, on_disk(file_bytes)
        self.ledger = Ledger(root / "lock")
        self._writing = Writing(root / "writing")

    def enter(self) -> None:
        """Make what a writer needs, unless it is there, and then remove what killed engines left.

        Raises:
            OSError: it cannot be written, or is locked for too long.
        """
        if self._writing.is_in():
            return
        with self.ledger.hold():
            self._writing.enter()
            self._writing.sweep()

    def leave(self) -> None:
        self._writing.leave()
        self.ledger.close()

    def try_to_write(self) -> None:
        """Write and remove a file. Warns if there is less space than the capacity.

        Raises:
            OSError: it cannot be written.
        """
        with self.ledger.hold():
            descriptor, path = self._writing.create(self._length)
            try:
                write_all(descriptor, [bytes(self._length)])
            finally:
                os.close(descriptor)
                path.unlink()
            used = self.ledger.read() or 0
        free = shutil.disk_usage(self._root).free
        if free + used < self._capacity:
            logger.warning(
                "kv_tiers.disk_gib is %g, and %s has %.1f GiB free: stores fail once it is full",
                self._capacity / 2**30,
                self._root.parent,
                free / 2**30,
            )

    def write(self, index: Index, space: Space, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file under a name of a space. If the space was reset since it was opened, the file shares its fate.

        Raises:
            OSError: from the system; nothing is left of it.
            TierFault: there is no room.
        """
        descriptor, path = self._reserve(index)
        try:
            try:
                write_all(descriptor, parts)
                touch(descriptor)
            finally:
                os.close(descriptor)
            _place(path, space, name)
        except BaseException:
            self._give_back(path)
            raise

    def has(self, space: Space, name: str) -> bool:
        """Return whether a file is there and has its length, and note that it is used. One that has not is removed."""
        try:
            status = os.stat(path_of(name), dir_fd=space.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if status.st_size != self._length:
            self.remove(space, name)
            return False
        touch(path_of(name), space.descriptor)
        return True

    def remove(self, space: Space, name: str) -> None:
        """Remove a file, if it can be. Does not wait for others that hold the ledger: the count then stays too high
        until somebody counts anew."""
        with suppress(OSError), self.ledger.hold(0):
            size = os.stat(path_of(name), dir_fd=space.descriptor, follow_symlinks=False).st_size
            os.unlink(path_of(name), dir_fd=space.descriptor)
            self.ledger.add(-on_disk(size))
        with suppress(OSError):
            os.unlink(path_of(name), dir_fd=space.descriptor)

    def count(self, index: Index) -> int:
        """Correct the count, which a killed engine may have left too high, and hold the bound, which may be a new one.
        Return the count. If it is above the capacity, the next call goes on.

        Raises:
            OSError: from the system.
        """
        with self.ledger.hold():
            return self._make_room(index, 0)

    def _reserve(self, index: Index) -> tuple[int, Path]:
        """Make room for a file, and an empty one to write to."""
        try:
            return self._reserved(index)
        except FileNotFoundError:  # somebody emptied the directory
            make_private(self._root)
            self.enter()
            return self._reserved(index)

    def _reserved(self, index: Index) -> tuple[int, Path]:
        with self.ledger.hold():
            used = self.ledger.read()
            if used is None or used + self._size > self._capacity:
                used = self._make_room(index, self._size)
            if used + self._size > self._capacity:
                raise TierFault(f"{self._root} has no room yet for another file")
            self.ledger.write(used + self._size)
            try:
                return self._writing.create(self._length)
            except OSError:
                self.ledger.write(used)
                raise

    def _make_room(self, index: Index, size: int) -> int:
        """Count what all files take, and remove some if `size` bytes more are too many. Return the count."""
        self._writing.sweep()
        written = self._writing.num_bytes()  # before the others are listed, lest one is counted in neither place
        index.refresh()
        if index.used_bytes + written + size > self._capacity:
            index.evict(self._capacity - max(size, self._capacity // _ROOM) - written, _EVICT_S)
        used = index.used_bytes + written
        self.ledger.write(used)
        return used

    def _give_back(self, path: Path) -> None:
        """Remove a file that was not placed, and its bytes from the count. If others hold the ledger too long, the
        count stays too high until they count anew."""
        with suppress(OSError), self.ledger.hold():
            path.unlink()
            self.ledger.add(-self._size)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def path_of(name: str) -> str:
    """Return the path of a file below its space."""
    return f"{name[:2]}/{name}"


def touch(file: int | str, directory: int | None = None) -> None:
    """Note that a file is used: an open one, or one below an open directory. A directory that cannot be written knows
    no use. The system's own time would be the same for all blocks of a few milliseconds, and lose their order."""
    now_ns = time.time_ns()
    with suppress(OSError):
        os.utime(file, ns=(now_ns, now_ns), dir_fd=directory)


def _place(path: Path, space: Space, name: str) -> None:
    """Give a whole file its name, in one instant."""
    try:
        os.rename(path, path_of(name), dst_dir_fd=space.descriptor)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another thread makes it, too
            os.mkdir(name[:2], 0o700, dir_fd=space.descriptor)
        os.rename(path, path_of(name), dst_dir_fd=space.descriptor)
