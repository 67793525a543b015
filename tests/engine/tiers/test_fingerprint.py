"""A model's fingerprint changes with any bit of what its KV depends on, and with nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.tiers import fingerprint as module
from engine.tiers.fingerprint import fingerprint

FACTS = {"dtype": "bfloat16", "block_size": "16"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"layers": 2}')
    (path / "model.safetensors").write_bytes(b"weights" * 1000)
    (path / "README.md").write_text("a model")
    (path / "prepared.json").write_text('{"source": "here"}')
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content was read."""
    read: list[str] = []
    sha256 = module._sha256

    def noted(path: Path) -> str:
        read.append(path.name)
        return sha256(path)

    monkeypatch.setattr(module, "_sha256", noted)
    return read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(module, "_SETTLED_S", -3600.0)


def flip(path: Path) -> None:
    """Change one bit, and neither the length nor the time of the last change of the content."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rename_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")


def add_config(model: Path) -> None:
    (model / "preprocessor_config.json").write_text("{}")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: flip(model / "model.safetensors"),
        lambda model: flip(model / "config.json"),
        rename_weights,
        add_config,
    ],
    ids=["a bit of the weights", "a bit of the config", "another name", "another file"],
)
def test_any_change_of_the_model_changes_it(model: Path, cache: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    change(model)
    assert fingerprint(model, FACTS, cache=cache) != before


@pytest.mark.parametrize("facts", [{}, {**FACTS, "dtype": "float16"}, {**FACTS, "more": ""}, {"dtype": "bfloat16"}])
def test_any_change_of_a_fact_changes_it(model: Path, cache: Path, facts: dict[str, str]) -> None:
    assert fingerprint(model, facts, cache=cache) != fingerprint(model, FACTS, cache=cache)


def test_another_version_of_the_format_changes_it(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    monkeypatch.setattr(module, "FORMAT_VERSION", module.FORMAT_VERSION + 1)
    assert fingerprint(model, FACTS, cache=cache) != before


def test_where_the_model_lies_and_what_describes_it_make_no_difference(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy/README.md").write_text("moved")
    (tmp_path / "copy/prepared.json").write_text('{"source": "there"}')
    assert fingerprint(tmp_path / "copy", dict(reversed(FACTS.items())), cache=cache) == before
    assert len(before) == 32


def test_weights_behind_a_link_are_read_as_in_a_hubs_cache(model: Path, cache: Path, tmp_path: Path) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    assert fingerprint(model, FACTS, cache=cache) == before
    flip(tmp_path / "blob")
    assert fingerprint(model, FACTS, cache=cache) != before


@pytest.mark.usefixtures("settled")
def test_the_next_start_reads_no_weights_again(model: Path, cache: Path, reads: list[str]) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert fingerprint(model, FACTS, cache=cache) == before
    assert len(reads) == 2
    flip(model / "config.json")
    fingerprint(model, FACTS, cache=cache)
    assert reads[2:] == ["config.json"]


def test_what_was_just_written_is_read_again(model: Path, cache: Path, reads: list[str]) -> None:
    """It could change once more at the same time, as the clock of files counts."""
    for _ in range(2):
        fingerprint(model, FACTS, cache=cache)
    assert len(reads) == 4


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"of": []}'])
def test_a_damaged_note_is_no_note(model: Path, cache: Path, reads: list[str], text: str) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    for note in cache.iterdir():
        note.write_text(text)
    assert fingerprint(model, FACTS, cache=cache) == before
    assert len(reads) == 4


def test_without_a_place_for_notes_all_is_read_and_a_line_says_so(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = fingerprint(model, FACTS, cache=cache)
    assert not caplog.messages
    (cache.parent / "file").write_text("")
    assert fingerprint(model, FACTS, cache=cache.parent / "file") == before
    assert "each start reads all weights" in caplog.text


def test_notes_lie_in_a_directory_of_the_users_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fingerprint(model, FACTS)
    (own,) = tmp_path.glob("chunkserve-digests-*")
    assert own.stat().st_mode & 0o777 == 0o700
