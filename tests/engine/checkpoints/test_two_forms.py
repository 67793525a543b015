"""Owns the contract of the two forms of a GGUF file: which is taken where one cannot be made, and never a damaged one.
Never downloads: what pip would fetch is made here, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoints import gguf_convert
from engine.checkpoints.model_cache import ModelError
from engine.checkpoints.prepare import main, prepare_model
from tests.support.tiny_gguf import write_gguf


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a small GGUF file, beside a cache of its own."""
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    return str(write_gguf(tmp_path / "tiny.gguf"))


def prepare(file: str, *, stored: bool, either: bool = False, verify: bool = False) -> Path:
    return prepare_model(file, progress=False, stored=stored, either=either, verify=verify)


def refuse_to_convert(patch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    patch.setattr(gguf_convert, "convert_gguf", refuse)


def damage(directory: Path) -> None:
    """Change a byte of the weights, and no size."""
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize("stored", [False, True])
def test_where_a_form_cannot_be_made_the_other_will_do_if_it_is_there(
    stored: bool, file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that is mounted for reading, or a machine without a network and the default model of an older release."""
    other = prepare(file, stored=not stored)
    refuse_to_convert(monkeypatch, OSError("the disk is full"))
    assert prepare(file, stored=stored, either=True) == other
    (warning,) = caplog.records  # whether progress is shown or not
    assert warning.levelname == "WARNING"
    assert f"is taken in another form, from {other}: " in warning.getMessage()
    assert "the disk is full" in warning.getMessage()
    with pytest.raises(ModelError, match="the disk is full"):
        prepare(file, stored=stored)
    (other / "config.json").unlink()
    with pytest.raises(ModelError, match="the disk is full"):
        prepare(file, stored=stored, either=True)


def test_a_file_that_cannot_be_converted_is_refused_though_its_other_form_is_there(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(file, stored=True)
    refuse_to_convert(monkeypatch, ModelError("tensor blk.0.attn_q.weight is missing"))
    with pytest.raises(ModelError, match="is missing"):
        prepare(file, stored=False, either=True)


def test_a_form_that_verify_finds_damaged_is_not_replaced_by_the_other(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = prepare(file, stored=True)
    prepare(file, stored=False)
    damage(stored)
    with pytest.raises(ModelError, match="was recorded when it was prepared"):
        prepare(file, stored=True, either=True, verify=True)
    damage(prepare(file, stored=False))
    assert main([file, "--verify"]) == 1  # whichever form this machine's engines want
    assert "was recorded when it was prepared" in capsys.readouterr().err


def test_verify_reads_the_other_form_where_that_is_taken(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = prepare(file, stored=False)
    refuse_to_convert(monkeypatch, OSError("the disk is full"))
    assert prepare(file, stored=True, either=True, verify=True) == other
    damage(other)
    with pytest.raises(ModelError, match="was recorded when it was prepared"):
        prepare(file, stored=True, either=True, verify=True)
