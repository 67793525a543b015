"""Owns the disk tier: blocks in files of a directory that a machine's engines share, and that outlives them.
Never returns a block that is not bit for bit what was written under its digest for this model and key."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from engine.config import ConfigError
from engine.tiers.block_file import FORMAT_VERSION, BadFile, BlockFormat
from engine.tiers.cipher import KEY_BYTES, Aes256Gcm, Checksum, Names
from engine.tiers.disk_index import Index, Space, minute_of
from engine.tiers.disk_writer import DiskWriter, path_of, touch
from engine.tiers.faults import TierFault
from engine.tiers.ledger import on_disk
from engine.tiers.pause import Pause
from engine.tiers.private_directory import (
    directory_key,
    keep_key,
    make_private,
    private_directory,
    refusing_what_cannot_be_written,
)
from engine.tiers.trash import TRASH, empty_trash, remove_unused

POLL_S = 2.0
"""How often to look for what other engines did. A look takes milliseconds, and never more than a twentieth of the
time."""
MAX_CHANGES = 2048
"""Changes that are handed over at once: a step waits while they are entered."""

_CLOSE_S = 2.0
"""How long closing may go on removing the files of a reset. The next engine removes the rest."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A pipe that somebody put there is no reason to wait."""
_NO_FILE = (errno.ELOOP, errno.ENXIO)
"""Errors from opening a link and a socket."""

logger = logging.getLogger(__name__)


class DiskTier:
    """All methods may be called on any thread. `read`, `write`, `drop` and `reset` wait for the disk, and `write` for
    other engines, a few seconds at most."""

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        block_bytes: int,
        fingerprint: bytes,
        key: bytes | None,
        poll_s: float = POLL_S,
    ) -> None:
        """Open or make the directory. What is in it is reported by `take_changes`, soon.

        capacity_bytes: the most that all files take together, those of other models and engines included.
        block_bytes: length of each block. fingerprint: what everything that shapes a block's bits comes down to; see
        engine.tiers.fingerprint. key: KEY_BYTES; None means that files are not encrypted.

        Raises:
            ConfigError: the directory is not private or cannot be used, or no block fits. A directory that cannot be
                written is used for reading, if it has blocks of this model.
        """
        assert key is None or len(key) == KEY_BYTES, len(key or b"")
        self.path = private_directory(path)
        self._root = self.path / f"v{FORMAT_VERSION}"
        self._capacity, self._encrypted = capacity_bytes, key is not None
        self._key = self._read_or_make_key(key)
        self._names = Names(self._key, fingerprint)
        seal = Checksum() if key is None else Aes256Gcm(key)
        self._format = BlockFormat(block_bytes=block_bytes, space=self._names.space, seal=seal)
        self._size = on_disk(self._format.file_bytes)
        self._check_capacity()

        self._pause = Pause(f"stores to {self.path}")
        self._writer = DiskWriter(self._root, capacity_bytes=capacity_bytes, file_bytes=self._format.file_bytes)
        self._changes: deque[tuple[str, bytes]] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._warned: set[str] = set()
        self._refusal = ""
        self._index = self._open_index()
        self._poll_s, self._close_by = poll_s, 0.0
        self.listed = threading.Event()
        """Set once everything that was there at the start has been reported."""
        self._due, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kv-disk", daemon=True)
        self._thread.start()

    def read(self, digest: bytes, into: memoryview) -> None:
        """Read a block into `into`, block_bytes bytes, which is undefined after an error.

        Raises:
            TierFault: it is not there, or not as it was written. It is then gone, and a change says so.
        """
        self._check_usable()
        space, name = self._index.own, self._names.encode(digest)
        path = path_of(name.hex())
        try:
            descriptor = os.open(path, _READ, dir_fd=space.descriptor)
        except OSError as error:
            if error.errno in _NO_FILE:
                self._writer.remove(space, name.hex())
            self._lose(space, digest, name)
            self._check_not_reset(space)
            raise TierFault(f"{space.path / path} cannot be opened: {error.strerror}") from error
        try:
            self._format.read(descriptor, name, memoryview(into).cast("B"))
            _touch(descriptor)
        except (BadFile, OSError) as error:
            if _is_still(space, path, descriptor):
                self._writer.remove(space, name.hex())
            self._lose(space, digest, name)
            fault = f"{space.path / path} is removed: {error}"
            self._warn("read", f"KV is computed again, and from now on only the metrics count this: {fault}")
            raise TierFault(fault) from error
        finally:
            os.close(descriptor)
        self._check_not_reset(space)

    def write(self, digest: bytes, data: memoryview) -> int:
        """Write a block, unless its file is there; return how many bytes it takes on disk. Nothing is synced: what a
        power cut takes is computed again, and what it tears is found by its check.

        Raises:
            TierFault: nothing was written; a reset came between; there is no room; or stores pause after failures.
        """
        self._check_usable()
        if refusal := self._pause.refusal():
            raise TierFault(refusal)
        space, name = self._index.own, self._names.encode(digest)
        with self._index.expecting(name.hex()):
            try:
                if not self._writer.has(space, name.hex()):
                    parts = self._format.encode(name, memoryview(data).cast("B"))
                    self._writer.write(self._index, space, name.hex(), parts)
                    self._pause.succeeded()
            except OSError as error:
                self._check_not_reset(space)
                self._pause.failed(error)
                raise TierFault(f"{space.path / path_of(name.hex())} cannot be written: {error}") from error
            finally:
                self._notify()  # of what had to leave
            self._check_not_reset(space)
            self._index.add(space, name.hex(), self._size)
        return self._size

    def drop(self, digests: Iterable[bytes]) -> None:
        """Remove blocks, for all engines. They are not reported to this one."""
        space = self._index.own
        for digest in digests:
            name = self._names.encode(digest).hex()
            self._writer.remove(space, name)
            self._index.discard(space, name)

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Return what appeared or left since the last call, other than by this engine's writes and drops, and whether
        it is there now. At most MAX_CHANGES; with more, `wake` is called again."""
        taken: list[tuple[bytes, bool]] = []
        with suppress(IndexError):  # the last was taken, or a reset took them
            while len(taken) < MAX_CHANGES:
                name, digest = self._changes.popleft()
                # Not as it was when it changed: the engine may have written or dropped it since.
                taken.append((digest, self._index.has(name)))
        self._notify()
        return taken

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever changes become available, on any thread. It is quick, and never raises."""
        self._wake = wake
        self._notify()

    def sizes(self) -> tuple[int, int]:
        """Return the capacity, and what all files take, in bytes, as of the last look."""
        return self._capacity, self._writer.ledger.last

    def refresh(self) -> None:
        """Look now for what others did. The tier's own thread does so every `poll_s` seconds.

        Raises:
            OSError: from the system.
        """
        self._index.refresh(self._proceed)
        self._writer.ledger.look()
        self._notify()

    def reset(self) -> int:
        """Remove all blocks of this model and key, for all engines; return how many this one knew of.

        When this returns, no read that begins finds one of them, in no process, and no write that began before brings
        one back; changes that were not taken are void. The files themselves are removed soon after, by the tier's
        thread. Others learn of it at their next look, and from faults of their reads and writes until then.

        Raises:
            TierFault: the directory cannot be written. This engine uses it no more.
        """
        self._check_usable()
        try:
            count = self._index.reset(self._root / f"{TRASH}{uuid.uuid4().hex}", self._changes.clear)
        except OSError as error:
            self._refusal = f"{self.path} could not be reset, and is not used any more: {error}"
            logger.error("%s", self._refusal)
            raise TierFault(self._refusal) from error
        self._due.set()
        return count

    def close(self) -> None:
        """End the tier's thread. Reads and writes that are under way come to their end; later ones fail."""
        self._refusal = self._refusal or f"{self.path} is closed"
        self._close_by = time.monotonic() + _CLOSE_S
        self._stopping.set()
        self._due.set()
        self._thread.join(2 * _CLOSE_S)
        self._writer.leave()

    def _read_or_make_key(self, key: bytes | None) -> bytes:
        """Make the directory of this version, and return what names its files."""
        with refusing_what_cannot_be_written(self.path):
            self._root.mkdir(mode=0o700, exist_ok=True)
            return key or directory_key(self._root)

    def _check_capacity(self) -> None:
        if self._size > self._capacity:
            raise ConfigError(
                f"kv_tiers.disk_gib is {self._capacity / 2**30:g}, and a file of one block takes "
                f"{self._size / 2**30:g} GiB."
            )

    def _open_index(self) -> Index:
        own = self._root / self._names.space.hex()
        readable = own.is_dir()
        with refusing_what_cannot_be_written(self.path):
            try:
                self._writer.enter()
                self._writer.try_to_write()
            except OSError as error:
                if not readable:
                    raise
                self._pause.failed(error)
            return Index(self.path, own, self._report)

    def _lose(self, space: Space, digest: bytes, name: bytes) -> None:
        """Note that a block cannot be read."""
        self._index.discard(space, name.hex())
        self._changes.append((name.hex(), digest))
        self._notify()

    def _check_usable(self) -> None:
        if self._refusal:
            raise TierFault(self._refusal)

    def _check_not_reset(self, space: Space) -> None:
        """Fault if this or another engine has reset the directory since `space` was opened; open the new one."""
        if not space.is_there():
            with suppress(OSError):  # the next look tries again
                self._index.reopen()
            raise TierFault(f"{space.path} was reset")

    def _report(self, name: str) -> None:
        """Report a change of a file. One whose name this key did not make counts, and is left alone."""
        try:
            digest = self._names.decode(bytes.fromhex(name))
        except ValueError:
            return
        if digest is not None:
            self._changes.append((name, digest))

    def _notify(self) -> None:
        if self._changes:
            self._wake()

    def _proceed(self) -> bool:
        self._notify()
        return not self._stopping.is_set()

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)

    def _keep(self) -> None:
        """Run the tier's thread."""
        look = self._count
        while not self._stopping.is_set():
            began = time.monotonic()
            if self._round(look):
                look = self.refresh
            self.listed.set()
            self._due.wait(max(self._poll_s, 20 * (time.monotonic() - began)))
            self._due.clear()
        self._round(lambda: None)

    def _round(self, look: Callable[[], None]) -> bool:
        with suppress(OSError):  # it may be there for reading alone; otherwise the look fails, too
            self._make()
        try:
            empty_trash(self._root, self._writer.ledger, self._may_go_on)
        except OSError as error:
            self._warn("trash", f"files of a reset in {self.path} cannot be removed yet: {error}")
        try:
            look()
        except OSError as error:
            self._warn("look", f"what others do in {self.path} cannot be seen: {error}")
            return False
        return True

    def _may_go_on(self) -> bool:
        return not self._stopping.is_set() or time.monotonic() < self._close_by

    def _make(self) -> None:
        """Make what the directory needs, unless it is there: somebody may have emptied it."""
        make_private(self._root)
        if not self._encrypted:
            keep_key(self._root, self._key)
        self._writer.enter()

    def _count(self) -> None:
        """List the directory for the first time, and hold its bound."""
        remove_unused(self._root, self._names.space.hex())
        self.refresh()
        with suppress(OSError):  # it is there for reading alone
            self._hold_bound()

    def _hold_bound(self) -> None:
        last = None
        while not self._stopping.is_set():
            used = self._writer.count(self._index)
            self._notify()
            if used <= self._capacity or (last is not None and used >= last):  # held, or nothing that could leave
                return
            last = used


def _is_still(space: Space, path: str, descriptor: int) -> bool:
    """Return whether a path still leads to an open file, and not to one that was written since."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=space.descriptor, follow_symlinks=False))
    except OSError:
        return False


def _touch(descriptor: int) -> None:
    """Note that a file is used, once in a minute of the clock: then all that is read of a chain is of one minute."""
    if minute_of(os.fstat(descriptor).st_mtime_ns) != minute_of(time.time_ns()):
        touch(descriptor)
