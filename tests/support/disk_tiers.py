"""Owns disk tiers as tests use them: small blocks whose content follows from their digest, and processes of others.
Never waits for a time: a tier's own events say when something happened."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import shake_256
from pathlib import Path
from typing import Any

import pytest

from engine.tiers.disk import DiskTier
from engine.tiers.faults import TierFault
from loadtest.server import ROOT

BLOCK_BYTES = 1000
FILE_BYTES = 4096
"""What each file takes: a page."""
PLENTY = 1000 * FILE_BYTES
MODEL = b"a model's fingerprint".ljust(32)
KEY = bytes(range(32))
TIMEOUT_S = 30.0
"""Only ever reached by a failure."""
NEVER_S = 3600.0
"""The tier's thread looks once, and then when it is told to."""


def digest(number: int) -> bytes:
    return shake_256(b"digest %d" % number).digest(16)


def content(of: bytes) -> bytes:
    """Return the one content that a block of this digest has."""
    return shake_256(b"content" + of).digest(BLOCK_BYTES)


@contextmanager
def opened(path: Path, *, listed: bool = True, **changes: Any) -> Iterator[DiskTier]:
    """Open a tier, and close it in the end. listed: begin once it has listed what was there."""
    settings: dict[str, Any] = {"capacity_bytes": PLENTY, "block_bytes": BLOCK_BYTES, "fingerprint": MODEL, "key": None}
    tier = DiskTier(path, **{**settings, "poll_s": NEVER_S, **changes})
    try:
        assert not listed or tier.listed.wait(TIMEOUT_S)
        yield tier
    finally:
        tier.close()


def store(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        tier.write(digest(number), memoryview(content(digest(number))))


def loaded(tier: DiskTier, number: int) -> bytes:
    """Read a block. Raises TierFault."""
    into = bytearray(b"?" * BLOCK_BYTES)
    tier.read(digest(number), memoryview(into))
    return bytes(into)


def is_right(tier: DiskTier, number: int) -> bool:
    """Return whether a block is there. What is there must be right."""
    try:
        found = loaded(tier, number)
    except TierFault:
        return False
    assert found == content(digest(number)), number
    return True


def there(tier: DiskTier, numbers: Iterable[int] = range(12)) -> list[int]:
    """List the blocks that are there and right."""
    return [number for number in numbers if is_right(tier, number)]


def used_at(path: Path, age_s: float) -> None:
    """Make a file one that was last used so long ago."""
    now = time.time()
    os.utime(path, (now - age_s, now - age_s))


def files(path: Path) -> list[Path]:
    """List the files of blocks, of all models."""
    return [found for found in all_files(path) if not found.parts[-3].startswith("trash")]


def all_files(path: Path) -> list[Path]:
    """List the files of blocks, those of a reset included, while a tier's thread may be removing them."""
    walked = [Path(folder, name) for folder, _, names in os.walk(path / "v2") for name in names]
    return sorted(found for found in walked if len(found.relative_to(path).parts) == 4)


def file_of(path: Path, tier: DiskTier, number: int) -> Path:
    """Return the file that a block has, by what appears when it is written."""
    before = files(path)
    store(tier, number)
    (found,) = set(files(path)) - set(before)
    return found


def path_of(tier: DiskTier, number: int) -> Path:
    """Return the path that a block's file has or would have."""
    name = tier._names.encode(digest(number)).hex()
    return tier.path / "v2" / tier._names.space.hex() / name[:2] / name


def bytes_on_disk(path: Path) -> int:
    """Count what all files of all blocks take, whole or under way, trash included."""
    return FILE_BYTES * (len(all_files(path)) + len(list((path / "v2/writing").glob("*.*"))))


class Watch:
    """Collects the changes that a tier reports."""

    def __init__(self, tier: DiskTier) -> None:
        self.present: dict[bytes, bool] = {}
        self.all: list[tuple[bytes, bool]] = []
        self._tier, self._event = tier, threading.Event()
        tier.on_change(self._event.set)

    def take(self) -> None:
        self._event.clear()
        taken = self._tier.take_changes()
        self.all += taken
        self.present.update(taken)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the changes so far make a condition true."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._event.wait(end - time.monotonic()), "no change came"
            self.take()


def until(condition: Callable[[], object]) -> None:
    """Wait for what another process or the tier's thread does."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run code of another engine, which says `ready` once it is, in a process that is killed in the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True, bufsize=1
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def broken_disk(error: str) -> Iterator[list[str]]:
    """Make everything that writes fail with an error of the system, by its name; a full disk and a broken one fail as
    bytes are written. Yields the names of the calls that failed."""
    failed: list[str] = []
    calls = ["writev", "pwrite"] if error in ("ENOSPC", "EIO", "EDQUOT") else ["mkdir", "rename", "unlink", "utime"]
    with pytest.MonkeyPatch.context() as patch:
        for call in calls:
            patch.setattr(os, call, _failing(call, error, failed))
        if "mkdir" in calls:
            patch.setattr(os, "open", _failing_to_write(os.open, error, failed))
        yield failed


def _failing(call: str, error: str, failed: list[str]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        failed.append(call)
        number = getattr(errno, error)
        raise OSError(number, os.strerror(number))

    return fail


def _failing_to_write(opens: Callable[..., int], error: str, failed: list[str]) -> Callable[..., int]:
    def open_to_read(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & _WRITES:
            _failing("open", error, failed)()
        return opens(path, flags, *arguments, **named)

    return open_to_read
