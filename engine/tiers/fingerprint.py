"""Owns the fingerprint of a model: what its KV's bits depend on, its files' whole content included.
Never trusts a file's name or date for what is in it, and never reads gigabytes twice for nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from engine.host.own_directory import own_directory
from engine.tiers.block_file import FORMAT_VERSION

_CHUNK_BYTES = 1 << 22
_THREADS = 4
"""Hashing one file takes one core, 1,700 MB/s where the processor has instructions for SHA-256."""
_SETTLED_S = 3.0
"""A file that was changed later than so long before it was hashed may change again without a new time."""
_MADE = "prepared.json"
"""Says where the files came from, and is no part of the model."""

logger = logging.getLogger(__name__)


def fingerprint(model_dir: Path, facts: Mapping[str, str], *, cache: Path | None = None) -> bytes:
    """Return 32 bytes that differ if a file of the model, a fact or the format of files does. Where the model lies
    makes no difference.

    facts: everything else that a bit of KV depends on, by name. cache: the directory that keeps files' digests, so that
    the next start need not read them; None means one of this user's for temporary files. Where none can be used, a
    warning says so, and all files are read.

    Raises:
        OSError: a file of the model cannot be read.
    """
    files = sorted(path for path in model_dir.iterdir() if path.suffix in (".json", ".safetensors"))
    paths = [path for path in files if path.name != _MADE and path.is_file()]
    digests = _Digests(cache)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fingerprint") as pool:
        found = list(pool.map(digests.of, paths))
    document = {
        "format": FORMAT_VERSION,
        "files": [[path.name, digest] for path, digest in zip(paths, found, strict=True)],
        "facts": dict(facts),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()


class _Digests:
    """Files' digests, kept from start to start. A kept one counts as long as path, size, times and inode are what they
    were; the time of the last change of the inode is among them, which no program can set."""

    def __init__(self, directory: Path | None) -> None:
        self._directory: Path | None = None
        try:
            self._directory = directory or own_directory("chunkserve-digests")
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("files' digests cannot be kept, so each start reads all weights: %s", error)
            self._directory = None

    def of(self, path: Path) -> str:
        """Return the hexadecimal SHA-256 of a file. Raises OSError."""
        facts = _facts(path)
        kept = self._directory and self._directory / f"{hashlib.sha256(facts[0].encode()).hexdigest()[:32]}.json"
        if kept is not None and (digest := _read(kept, facts)) is not None:
            return digest
        digest = _sha256(path)
        if kept is not None and _facts(path) == facts and time.time_ns() - max(facts[2:4]) > _SETTLED_S * 1e9:
            _write(kept, facts, digest)
        return digest


def _facts(path: Path) -> tuple[str, int, int, int, int]:
    status = path.stat()
    return str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read(kept: Path, facts: tuple[str, int, int, int, int]) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or half of one
        document = json.loads(kept.read_text(encoding="utf-8"))
        if document["of"] == list(facts):
            return str(document["sha256"])
    return None


def _write(kept: Path, facts: tuple[str, int, int, int, int], digest: str) -> None:
    """Write the file whole or not at all: several engines may start at once."""
    aside = kept.with_suffix(f".{os.getpid()}")
    try:
        aside.write_text(json.dumps({"of": facts, "sha256": digest}) + "\n", encoding="utf-8")
        aside.replace(kept)
    except OSError as error:
        logger.warning("a file's digest cannot be kept, so the next start reads it: %s", error)
