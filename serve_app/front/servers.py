"""Owns the notes of this user's running servers, so that `serve status` needs no address beside `serve run`.
Never trusts the note of a server that has ended: a note's file is locked as long as its server lives."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.host.own_directory import own_directory

_NOTES = "chunkserve-servers"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The address of a server, and that of its Ray dashboard, which `serve status` asks. A server that only its handle
    reaches has the address ""."""

    url: str
    dashboard: str
    auth_mode: str
    """The value of RAY_AUTH_MODE for the dashboard; "" if it is unset."""


@contextmanager
def noted(server: RunningServer) -> Iterator[None]:
    """Keep a note of a server until the block, or the process, ends. If no note can be written, `serve status` needs an
    address."""
    try:
        path = own_directory(_NOTES) / uuid.uuid4().hex
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        _warn(error)
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            os.write(descriptor, json.dumps(asdict(server)).encode())
        except OSError as error:  # a full disk; an empty note is no server
            _warn(error)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _warn(error: OSError) -> None:
    logger.warning("serve status will not find this server: %s", error)


def running_servers() -> list[RunningServer]:
    """List this user's running servers on this machine."""
    try:
        paths = sorted(own_directory(_NOTES).iterdir())
    except OSError as error:
        logger.warning("running servers cannot be listed: %s", error)
        return []
    return [server for path in paths if (server := _read(path)) is not None]


def _read(path: Path) -> RunningServer | None:
    with suppress(FileNotFoundError), path.open("rb") as file:  # its server may end meanwhile
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        text = file.read()
        return RunningServer(**json.loads(text)) if text else None
    return None
