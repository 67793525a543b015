"""Owns what tests of checkpoints share: a cache of their own, and a small GGUF file.
Never reads or writes the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_gguf import write_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_path(tmp_path: Path, cache: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")
