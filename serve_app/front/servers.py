"""Owns the notes of this user's running servers, so that `serve status` beside `serve run` needs no address.
Never trusts a note of a server that has ended: a note's file is locked for as long as its server lives."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where a server answers, and where the dashboard of its Ray does, which `serve status` asks."""

    url: str
    dashboard: str
    auth_mode: str
    """What RAY_AUTH_MODE is to be for it; "" where it is unset."""


@contextmanager
def noted(server: RunningServer) -> Iterator[None]:
    """Note a server until the block, or the process, ends."""
    path = _directory() / uuid.uuid4().hex
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(asdict(server)).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def running_servers() -> list[RunningServer]:
    """Of this user, on this machine."""
    return [server for path in sorted(_directory().iterdir()) if (server := _read(path)) is not None]


def _directory() -> Path:
    directory = Path(tempfile.gettempdir()) / f"chunkserve-servers-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _read(path: Path) -> RunningServer | None:
    with suppress(FileNotFoundError), path.open("rb") as file:  # its server may end meanwhile
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        text = file.read()
        return RunningServer(**json.loads(text)) if text else None
    return None
