"""A model's name alone says whether it is one, and whether it is prepared; nothing is prepared to find out."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.checkpoints.model_cache import ModelError
from engine.checkpoints.model_name import Form, read_name, ready_directory
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from loadtest.server import ROOT


@pytest.mark.parametrize(
    ("name", "form"),
    [(DEFAULT_MODEL, Form.DEFAULT), ("x.gguf", Form.GGUF), (".", Form.DIRECTORY), ("org/name@v2", Form.HUB_ID)],
)
def test_a_name_has_one_of_four_forms(name: str, form: Form) -> None:
    assert read_name(name).form is form


def test_a_hub_id_may_have_a_revision() -> None:
    assert (read_name("org/name@v2").repo, read_name("org/name@v2").revision) == ("org/name", "v2")
    assert read_name("org/name").revision is None


def test_a_directory_goes_before_a_hub_id_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert read_name("org/name").path == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a" * 300, "cannot be read: File name too long|No model"),  # later releases of Python just say no
        ("~nobody-has-this-name/model", "No model '~nobody-has-this-name/model'"),
        ("~nobody-has-this-name/model.gguf", "is not there: expected a GGUF file"),
    ],
)
def test_a_path_that_cannot_be_looked_up_is_no_model(name: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        ready_directory(name)


def test_a_path_that_this_user_may_not_look_into_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(ModelError, match="/theirs/model cannot be read: Permission denied"):
        read_name("/theirs/model")
    assert read_name("org/name").form is Form.HUB_ID, "whatever the current directory is"


def test_a_cache_without_a_home_asks_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKSERVE_CACHE", "~nobody-has-this-name/cache")
    with pytest.raises(ModelError, match="set CHUNKSERVE_CACHE"):
        ready_directory(DEFAULT_MODEL)


def test_the_default_model_is_not_downloaded_to_find_out_whether_it_is_there(cache: Path) -> None:
    assert ready_directory(DEFAULT_MODEL) is None
    assert not cache.exists()


def test_a_gguf_file_is_ready_in_the_form_in_which_it_was_prepared(gguf_path: Path, cache: Path) -> None:
    name = str(gguf_path)
    assert ready_directory(name) is None
    assert not cache.exists()
    made = prepare_model(name, progress=False, stored=True)
    assert ready_directory(name, stored=True) == made
    assert ready_directory(name, stored=False) is None
    assert ready_directory(name, stored=False, either=True) == made
    assert ready_directory(name, stored=True, thorough=False) is None, "the file would have to be read whole"


@pytest.mark.parametrize("thorough", [False, True])
def test_a_gguf_file_that_is_not_there_is_refused(thorough: bool, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.gguf is not there"):
        ready_directory("no.gguf", thorough=thorough)


def test_a_directory_is_ready_if_it_can_be_served(gguf_path: Path, tmp_path: Path) -> None:
    local = shutil.copytree(prepare_model(str(gguf_path), progress=False), tmp_path / "local")
    assert ready_directory(str(local)) == local
    (local / "model.safetensors").unlink()
    assert ready_directory(str(local), weights=False) == local
    with pytest.raises(ModelError, match=r"it has no \*\.safetensors"):
        ready_directory(str(local))


def asked(name: str, home: Path) -> str:
    """Ask in a process of its own, since the hub's library reads its cache's place when it is imported. At the hub's
    address, nothing listens."""
    code = f"from engine.checkpoints.model_name import ready_directory; print(ready_directory({name!r}))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_id_is_ready_if_an_earlier_download_is_cached(gguf_path: Path, tmp_path: Path) -> None:
    assert ready_directory("org/tiny", thorough=False) is None
    assert asked("org/tiny", tmp_path / "hf") == "None"
    commit, repository = "0" * 40, tmp_path / "hf" / "hub" / "models--org--tiny"
    shutil.copytree(prepare_model(str(gguf_path), progress=False), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert asked("org/tiny", tmp_path / "hf") == str(repository / "snapshots" / commit)
    assert asked("org/tiny@other", tmp_path / "hf") == "None"
    (repository / "snapshots" / commit / "model.safetensors").unlink()
    assert asked("org/tiny", tmp_path / "hf") == "None", "a download that was interrupted is not ready"


def test_what_the_hubs_library_takes_for_no_id_is_refused() -> None:
    with pytest.raises(ModelError, match="a--b/c at revision main is no hub id"):
        ready_directory("a--b/c")
