"""Owns what is asked of the directory for KV at an engine's start, and the random key in one that has no other.
Never accepts a directory that somebody else may write to: files in it are other people's prompts in effect."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.config import ConfigError
from engine.tiers.cipher import KEY_BYTES

_KEY_FILE = "key"
_WHOLE_S = 1.0
"""How long an empty key may be one that another engine is about to write, where it cannot appear whole."""


def private_directory(path: Path) -> Path:
    """Return the directory `path`, made with mode 0700 if it is not there.

    Raises:
        ConfigError: it is none, cannot be made, belongs to another user, or others may write to it.
    """
    try:
        path = path.expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"kv_tiers.disk_path {path} has no place, because there is no such home directory.") from None
    with refusing_what_cannot_be_written(path):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"kv_tiers.disk_path {path} is or goes through a file: expected a directory.") from error
        except ValueError as error:  # a NUL
            raise ConfigError(f"kv_tiers.disk_path {str(path)!r} is no path: {error}.") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"kv_tiers.disk_path {path} belongs to user {status.st_uid} and has mode {status.st_mode & 0o7777:04o}: "
            f"expected a directory of user {os.getuid()} that nobody else may write to. A directory below it that is "
            "not there yet is made as one."
        )
    return path


def make_private(directory: Path) -> None:
    """Make a directory and the one that it lies in, unless they are there. Raises OSError."""
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def refusing_what_cannot_be_written(path: Path) -> Iterator[None]:
    """Raise errors of the system as a refusal of the directory `path`.

    Raises:
        ConfigError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"kv_tiers.disk_path {path} cannot be written: {error.strerror or error}.") from error


def directory_key(directory: Path) -> bytes:
    """Return the random key that names a directory's files where they are not encrypted; it is made at first use.
    Engines which start together have the same.

    Raises:
        ConfigError: the key is damaged.
        OSError: it cannot be read or made.
    """
    path = directory / _KEY_FILE
    keep_key(directory, os.urandom(KEY_BYTES))
    key = _read_key(path)
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"kv_tiers.disk_path: {path} has {len(key)} bytes, expected {KEY_BYTES}. Remove {directory}, of which "
            "nothing can be read any more."
        )
    return key


def keep_key(directory: Path, key: bytes) -> None:
    """Write a directory's key, unless it has one.

    Raises:
        OSError: it cannot be written.
    """
    path = directory / _KEY_FILE
    if path.exists():
        return
    aside = directory / f"{_KEY_FILE}.{os.urandom(8).hex()}"
    descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, key)
        os.fsync(descriptor)  # unlike a block, it cannot be made again
        with suppress(FileExistsError):  # of several engines that do so at once, the first succeeds
            _name(aside, path, key)
    finally:
        os.close(descriptor)
        aside.unlink(missing_ok=True)


def _name(aside: Path, path: Path, key: bytes) -> None:
    """Let the key that was written to `aside` appear as `path`: whole, where the file system has hard links.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written.
    """
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # FAT, SMB and some of FUSE have no links, and say so in different ways
        _create(path, key)


def _create(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, key)
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _read_key(path: Path) -> bytes:
    end = time.monotonic() + _WHOLE_S
    while not (key := path.read_bytes()) and time.monotonic() < end:
        time.sleep(0.01)
    return key
