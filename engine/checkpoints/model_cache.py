"""Owns the cache of prepared models: where each directory is, its marker and lock, and how it appears all at once.
Never knows what a model consists of, and never uses a directory whose files do not match its marker."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

MARKER = "prepared.json"
_CHUNK_BYTES = 1 << 22


class ModelError(ValueError):
    """A model cannot be prepared. The message names the file (and tensor), what was found and what was expected."""


class FilesMissingError(ModelError):
    """A directory lacks files. Those that are there are not at fault."""


class NotMadeError(ModelError):
    """A directory cannot be made here and now: no network, no space, or a cache that is only read. What the model
    consists of is not at fault, and no directory was found damaged."""


def say(message: str, progress: bool) -> None:
    """Print a message for the waiting user, on standard error: standard output is for the command's result."""
    if progress:
        print(message, file=sys.stderr, flush=True)


def byte_bar(what: str, total_bytes: int, progress: bool) -> tqdm[None]:
    """A progress bar in bytes, on standard error; silent when `progress` is false."""
    return tqdm(
        desc=what, total=total_bytes, unit="B", unit_scale=True, delay=0.3, disable=not progress, file=sys.stderr
    )


def cache_root() -> Path:
    """CHUNKSERVE_CACHE, else ~/.cache/chunkserve. Holds models/ and locks/.

    Raises:
        ModelError: there is no home directory, as for a user of a container whom it does not know.
    """
    given = os.environ.get("CHUNKSERVE_CACHE") or "~/.cache/chunkserve"
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError:
        text = f"The cache {given} has no place, because there is no such home directory: set CHUNKSERVE_CACHE."
        raise ModelError(text) from None


def sha256_of(path: Path, progress: bool = False) -> str:
    """Hexadecimal SHA-256 of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file, byte_bar(f"Hashing {path.name}", path.stat().st_size, progress) as bar:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def check_room(directory: Path, num_bytes: int) -> None:
    """Raise OSError if the file system of `directory` has less than num_bytes free: before the work, not in its middle.
    File systems that report no size are not asked."""
    usage = shutil.disk_usage(directory)
    if usage.total and usage.free < num_bytes:
        needed = f"{num_bytes / 1e6:.0f} MB are needed, and {usage.free / 1e6:.0f} MB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed}")


def intact(key: str) -> Path | None:
    """Return the directory models/`key` if it is there with all of its files, each of the recorded size."""
    directory = cache_root() / "models" / key
    return directory if _fault(directory) is None else None


def prepared(key: str, source: str, fill: Callable[[Path], None], *, verify: bool, progress: bool) -> Path:
    """Return the directory models/`key`, made by `fill(empty directory)` unless an intact one exists.

    Processes that need the same key at the same time wait for the first and share its work. The directory appears by
    one rename, marker included: an interrupted `fill` leaves nothing at the final path.

    Raises:
        NotMadeError: the cache cannot be written.
        ModelError: from `fill`; or `verify` found a file whose SHA-256 is not the recorded one.
    """
    directory = cache_root() / "models" / key
    # Checked before taking the lock, because a prepared cache may be mounted read-only.
    if _fault(directory) is not None:
        try:
            with _lock(key, source, progress):
                if (fault := _fault(directory)) is not None:
                    _replace(directory, fault, source, fill, progress)
        except OSError as error:
            raise NotMadeError(
                f"Cannot prepare {source} in the cache {cache_root()}: {error}. "
                "Expected a writable directory with space for the model; set CHUNKSERVE_CACHE to one."
            ) from error
    if verify:
        check_recorded(directory, progress)
    return directory


def _replace(directory: Path, fault: str, source: str, fill: Callable[[Path], None], progress: bool) -> None:
    """Fill a sibling directory and rename it. The caller holds the lock, so an existing sibling is left from a dead
    run."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    if directory.exists():
        say(f"Preparing {source} again: {fault}.", progress)
        shutil.rmtree(directory)
    unfinished.mkdir(parents=True)
    try:
        fill(unfinished)
        _write_marker(unfinished, source)
        os.replace(unfinished, directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def _lock(key: str, source: str, progress: bool) -> Iterator[None]:
    path = cache_root() / "locks" / f"{key}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Waiting for another process that is preparing {source} ({path}).", progress)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_marker(directory: Path, source: str) -> None:
    """Record every file's size and SHA-256. The files are synced to disk first, because after a power cut a file can
    have the right size and wrong contents."""
    files = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (directory / MARKER).write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n")


def _recorded_files(directory: Path) -> dict[str, tuple[int, str]]:
    """File name -> (bytes, SHA-256). Raises OSError, ValueError, KeyError, TypeError or AttributeError."""
    files = json.loads((directory / MARKER).read_text())["files"]
    return {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}


def _fault(directory: Path) -> str | None:
    """Why a prepared directory cannot be used, judged by its marker and file sizes; None if it can."""
    try:
        recorded = _recorded_files(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{directory / MARKER} is missing or unreadable ({type(error).__name__})"
    for name, (expected_bytes, _) in recorded.items():
        path = directory / name
        found_bytes = path.stat().st_size if path.is_file() else None
        if found_bytes != expected_bytes:
            return f"{path} has {found_bytes} bytes where {expected_bytes} were recorded"
    return None


def check_recorded(directory: Path, progress: bool) -> None:
    """Raise ModelError if a file of a prepared directory has another SHA-256 than when it was made."""
    for name, (_, expected) in _recorded_files(directory).items():
        found = sha256_of(directory / name, progress)
        if found != expected:
            raise ModelError(
                f"{directory / name} has SHA-256 {found}, but {expected} was recorded when it was prepared. "
                f"Delete {directory} to have it prepared again."
            )
