"""Owns disk tiers as tests use them: small blocks whose content follows from their digest, and processes of others.
Never waits for a time: a tier's own events say when something happened."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import shake_256
from pathlib import Path
from typing import Any

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


def files(path: Path) -> list[Path]:
    """List the files of blocks, of all models."""
    return sorted(found for found in (path / "v1").glob("*/??/*") if not found.parts[-3].startswith("trash"))


def file_of(path: Path, tier: DiskTier, number: int) -> Path:
    """Return the file that a block has, by what appears when it is written."""
    before = files(path)
    store(tier, number)
    (found,) = set(files(path)) - set(before)
    return found


def bytes_on_disk(path: Path) -> int:
    """Count what all files of all blocks take, whole or under way, trash included."""
    names = [*(path / "v1").glob("*/??/*"), *(path / "v1/writing").glob("*.*")]
    return FILE_BYTES * len(names)


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
