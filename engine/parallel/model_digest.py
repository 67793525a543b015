"""Owns the digest by which ranks, and engines of one deployment, see that they have read the same model.
Never reads a model whole: samples of each file tell two versions of weights apart, and a header two shapes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_SETTINGS = ("config.json", "model.safetensors.index.json")
_SAMPLE_BYTES = 4096
_SAMPLES = 256
"""How many a file has, evenly spaced. Training changes nearly all weights."""


def model_digest(model_dir: Path) -> str:
    """Return a digest of the model's files: names, sizes, beginnings, and samples of the rest. Where the directory lies
    makes no difference.

    Raises:
        OSError: a file cannot be read.
    """
    return _digest(sorted(path for path in model_dir.iterdir() if path.name in _SETTINGS or _has_weights(path)))


def file_digest(path: Path) -> str:
    """Return the same of a model in a single file. Raises OSError."""
    return _digest([path])


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, sample * size // _SAMPLES))
    return digest.hexdigest()


def _has_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" and path.is_file()
