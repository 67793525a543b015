"""Owns what an engine knows of the files in a directory that others change, too, and which of them leave first.
Never opens a block, and never waits for another engine."""

from __future__ import annotations

import heapq
import itertools
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.tiers.ledger import on_disk
from engine.tiers.private_directory import make_private

_VERSION = re.compile(r"v\d+")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_OTHERS = "writing"
"""The one directory of a version that has no blocks."""

_SETTLED_NS = 3_000_000_000
"""A directory that was changed later than so long before it was listed may change again without a new time."""

_MINUTE_NS = 60_000_000_000

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(slots=True)
class _Folder:
    """One of a space's 256 directories, as it was listed last."""

    changed_ns: int = -1
    settled: bool = False
    files: dict[str, int] = field(default_factory=dict)
    """The bytes that each file takes."""


class Space:
    """A directory of the blocks of one model and key. The descriptor stays with it when it is renamed, and ends with
    this object: a thread that still uses it never meets another directory under the same number."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises OSError."""
        self.path = path
        self.descriptor = os.open(path, _OPEN_DIRECTORY)
        weakref.finalize(self, os.close, self.descriptor)
        self.status = os.fstat(self.descriptor)
        self.folders: dict[str, _Folder] = {}

    def is_there(self) -> bool:
        """Return whether its path still leads to it."""
        try:
            return os.path.samestat(self.path.stat(), self.status)
        except OSError:
            return False

    def folder_names(self) -> list[str]:
        """List its directories. Raises OSError."""
        return [name for name in _listed(".", self.descriptor) if _FOLDER.fullmatch(name)]


class _Entry(NamedTuple):
    """A file, in the order of leaving. Of files that were used in the same minute the latest leaves first: a chain of
    blocks is written and read from its head on, and without its head the rest is of no use."""

    minute: int
    before_ns: int
    """Minus the time of use."""
    order: int
    """Unique, so that nothing behind it is compared, and falling."""
    space: Space
    folder: str
    name: str

    @property
    def used_ns(self) -> int:
        return -self.before_ns

    def is_there(self) -> bool:
        """Return whether the index still knows its file."""
        folder = self.space.folders.get(self.folder)
        return folder is not None and self.name in folder.files


class Index:
    """The files below `v1`, `v2` and so on, as of the last refresh and this engine's own doings. A file lies in
    `<version>/<space>/<first two digits of its name>/<name>`; it was last used when it was last modified."""

    def __init__(self, root: Path, own: Path, changed: Callable[[str], None]) -> None:
        """root: the directory of all versions. own: the path of this engine's space, which is made. changed: told of
        the name of each file in it that appeared or left by other hands.

        Raises:
            OSError: the space can be neither opened nor made.
        """
        self._root, self._own_path, self._changed = root, own, changed
        self._mutex = threading.Lock()
        self._spaces: dict[Path, Space] = {}
        self._oldest: list[_Entry] = []
        self._num_files = 0
        self._order = itertools.count(0, -1)
        self._expected: set[str] = set()
        self.used_bytes = 0
        self.own = self._opened_own()
        """This engine's space. After a reset it is another object."""

    def refresh(self, proceed: Callable[[], bool] = lambda: True) -> None:
        """Learn what others did. Asks `proceed` after each directory whether to go on.

        Raises:
            OSError: the first from the system. What could be listed was.
        """
        self._refresh_spaces()
        error: OSError | None = None
        for space in list(self._spaces.values()):
            for name in self._folder_names(space):
                try:
                    with self._mutex:
                        if self._spaces.get(space.path) is space:
                            self._refresh_folder(space, name)
                except OSError as caught:
                    error = error or caught
                if not proceed():
                    return
        if error is not None:
            raise error

    def has(self, name: str) -> bool:
        """Return whether the own space is known to have a file."""
        folder = self.own.folders.get(name[:2])
        return folder is not None and name in folder.files

    @contextmanager
    def expecting(self, name: str) -> Iterator[None]:
        """Do not report that this file of the own space appears: this engine writes it, and then adds it."""
        with self._mutex:
            self._expected.add(name)
        try:
            yield
        finally:
            with self._mutex:
                self._expected.discard(name)

    def add(self, space: Space, name: str, size: int) -> None:
        """Enter a file that this engine wrote, or found where it would have written it. size: what it takes."""
        with self._mutex:
            if space is self.own:
                self._add(space, name[:2], name, size, time.time_ns())
                space.folders[name[:2]].settled = False  # it may have left already

    def discard(self, space: Space, name: str) -> None:
        """Forget a file, without a report."""
        with self._mutex:
            if space is self.own:
                self._remove(space, name[:2], name)

    def evict(self, goal_bytes: int, budget_s: float) -> None:
        """Remove files, those first that were not used for longest by minutes, until they take at most `goal_bytes`,
        there is none, or the time is over: a disk may take milliseconds for each. The caller holds the ledger.

        Raises:
            OSError: one cannot be removed. The next call begins with others.
        """
        end = time.monotonic() + budget_s
        while self.used_bytes > goal_bytes:
            with self._mutex:
                if not self._oldest:
                    return
                self._evict(heapq.heappop(self._oldest))
            if time.monotonic() > end:
                return

    def reopen(self) -> None:
        """Make and open the own space again, if another engine's reset has removed it. Raises OSError."""
        with self._mutex:
            self._reopen()

    def reset(self, trash: Path, then: Callable[[], None]) -> int:
        """Rename the own space to `trash`, whatever is written into it meanwhile, and begin an empty one. Call `then`
        before anything is reported of it. Return the number of files that the old one was known to have: listing it
        would take seconds.

        Raises:
            OSError: it cannot be renamed.
        """
        with self._mutex:
            self._reopen()
            old = self.own
            num_files = sum(len(folder.files) for folder in old.folders.values())
            with suppress(FileNotFoundError):  # another engine's reset came first
                os.rename(self._own_path, trash)
            self._forget(old)
            then()
            self.own = self._opened_own()
            return num_files

    def _refresh_spaces(self) -> None:
        with self._mutex:
            if not self.own.is_there():
                self._reopen()
            for space in list(self._spaces.values()):
                if space is not self.own and not space.is_there():
                    self._forget(space)
            for path in self._space_paths():
                if path not in self._spaces:
                    self._open(path)

    def _folder_names(self, space: Space) -> list[str]:
        """List a space's directories: those that are there, and those that were."""
        try:
            names = space.folder_names()
        except FileNotFoundError:
            names = []
        return [*names, *(name for name in list(space.folders) if name not in names)]

    def _space_paths(self) -> list[Path]:
        versions = [self._root / name for name in os.listdir(self._root) if _VERSION.fullmatch(name)]
        entries = [entry for version in versions for entry in os.scandir(version)]
        return sorted(Path(entry) for entry in entries if entry.name != _OTHERS and entry.is_dir(follow_symlinks=False))

    def _open(self, path: Path) -> Space | None:
        try:
            self._spaces[path] = Space(path)
        except FileNotFoundError:
            return None  # removed since it was listed
        return self._spaces[path]

    def _opened_own(self) -> Space:
        make_private(self._own_path.parent)
        self._own_path.mkdir(mode=0o700, exist_ok=True)
        self._spaces[self._own_path] = own = Space(self._own_path)
        return own

    def _reopen(self) -> None:
        if self.own.is_there():
            return
        old = self.own
        self.own = self._opened_own()
        for folder in old.folders.values():
            for name in folder.files:
                self._changed(name)
        self._forget(old)

    def _refresh_folder(self, space: Space, name: str) -> None:
        folder = space.folders.setdefault(name, _Folder())
        try:
            status = os.stat(name, dir_fd=space.descriptor, follow_symlinks=False)
            if folder.settled and status.st_mtime_ns == folder.changed_ns:
                return
            descriptor = os.open(name, _OPEN_DIRECTORY, dir_fd=space.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            self._update(space, name, [], -1)
            del space.folders[name]
            return
        try:
            # Asked again: the directory may have been replaced, and its time must be of before the listing.
            folder.changed_ns, now_ns = os.fstat(descriptor).st_mtime_ns, time.time_ns()
            folder.settled = now_ns - folder.changed_ns > _SETTLED_NS
            self._update(space, name, os.listdir(descriptor), descriptor)
        finally:
            os.close(descriptor)

    def _update(self, space: Space, name: str, listed: list[str], descriptor: int) -> None:
        files, there = space.folders[name].files, set(listed)
        for gone in [file for file in files if file not in there]:
            self._remove(space, name, gone)
            if space is self.own:
                self._changed(gone)
        for new in [file for file in listed if file not in files]:
            try:
                status = os.stat(new, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                self._add(space, name, new, on_disk(status.st_size), status.st_mtime_ns)
                if space is self.own and new not in self._expected:
                    self._changed(new)

    def _add(self, space: Space, folder: str, name: str, size: int, used_ns: int) -> None:
        files = space.folders.setdefault(folder, _Folder()).files
        if name in files:
            return
        files[name] = size
        self.used_bytes += size
        self._num_files += 1
        self._push(space, folder, name, used_ns)
        if len(self._oldest) > 2 * self._num_files + 1024:
            self._compact()

    def _push(self, space: Space, folder: str, name: str, used_ns: int) -> None:
        minute = minute_of(used_ns)
        heapq.heappush(self._oldest, _Entry(minute, -used_ns, next(self._order), space, folder, name))

    def _remove(self, space: Space, folder: str, name: str) -> None:
        files = space.folders[folder].files if folder in space.folders else {}
        if name in files:
            self.used_bytes -= files.pop(name)
            self._num_files -= 1

    def _forget(self, space: Space) -> None:
        """Drop a space and all of its files, and what would keep its descriptor open."""
        if self._spaces.get(space.path) is space:
            del self._spaces[space.path]
        for folder in space.folders.values():
            self.used_bytes -= sum(folder.files.values())
            self._num_files -= len(folder.files)
        space.folders.clear()
        self._oldest = [entry for entry in self._oldest if entry.space is not space]
        heapq.heapify(self._oldest)

    def _evict(self, entry: _Entry) -> None:
        if not entry.is_there():
            return
        space, folder, name = entry.space, entry.folder, entry.name
        path = f"{folder}/{name}"
        try:
            modified_ns = os.stat(path, dir_fd=space.descriptor, follow_symlinks=False).st_mtime_ns
            if modified_ns > entry.used_ns:  # used since it was listed
                self._push(space, folder, name, modified_ns)
                return
            os.unlink(path, dir_fd=space.descriptor)
        except FileNotFoundError:
            pass
        except OSError:
            # Behind all others, those of this minute too: whoever needs room next does not fail by the same file.
            self._push(space, folder, name, time.time_ns() + _MINUTE_NS)
            raise
        self._remove(space, folder, name)
        if space is self.own:
            self._changed(name)

    def _compact(self) -> None:
        """Leave out entries of files that are gone, and all but the latest of each that is there."""
        latest = {
            (entry.space, entry.folder, entry.name): entry
            for entry in sorted(self._oldest, key=lambda entry: entry.used_ns)
            if entry.is_there()
        }
        self._oldest = list(latest.values())
        heapq.heapify(self._oldest)


def minute_of(time_ns: int) -> int:
    """Return the minute that a time of use counts as."""
    return time_ns // _MINUTE_NS


def _listed(name: str, descriptor: int) -> list[str]:
    """List a directory below an open one. It is opened anew: threads that list one descriptor share its position."""
    opened = os.open(name, _OPEN_DIRECTORY, dir_fd=descriptor)
    try:
        return os.listdir(opened)
    finally:
        os.close(opened)
