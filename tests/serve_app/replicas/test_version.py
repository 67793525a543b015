"""Owns the contract of the digests that tell two versions of an engine deployment apart.
Never starts an engine: the digests follow from settings and files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from serve_app.replicas.version import files_digest, wanted_version
from serve_app.settings.application import AppSettings
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import save_model, save_tokenizer

BEFORE: dict[str, Any] = {
    "model": "org/name",
    "engine": {"max_loras": 1, "max_num_seqs": 8},
    "lora_adapters": {"a": "/a"},
}


def changed(settings: dict[str, Any]) -> AppSettings:
    engine = BEFORE["engine"] | settings.get("engine", {})
    return AppSettings.model_validate(BEFORE | settings | {"engine": engine})


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "org/name@v2"},
        {"engine": {"dtype": "float32"}},
        {"engine": {"quantize": "none"}},
        {"engine": {"kv_cache_dtype": "int8"}},
        {"engine": {"executor": "fake"}},
        {"engine": {"fake": {"reply": "b"}}},
    ],
    ids=str,
)
def test_what_computes_the_answer_makes_another_model(settings: dict[str, Any]) -> None:
    before, after = wanted_version(changed({}), 2), wanted_version(changed(settings), 2)
    assert before.model != after.model
    assert before.settings != after.settings


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": {"max_num_seqs": 9}},
        {"engine": {"max_model_len": 900}},
        {"engine": {"kernels": "torch_cpu"}},
        {"engine": {"fake": {"step_delay_ms": 3}}},
        {"lora_adapters": {"a": "/b"}},
        {"lora_adapters": {}},
        {"engine_num_gpus": 1},
        {"engine_num_cpus": 3},
    ],
    ids=str,
)
def test_other_settings_of_engines_make_another_version_of_the_same_model(settings: dict[str, Any]) -> None:
    before, after = wanted_version(changed({}), 2), wanted_version(changed(settings), 2)
    assert before.model == after.model
    assert before.settings != after.settings


@pytest.mark.parametrize(
    "settings",
    [{"ingress_replicas": 3}, {"served_model_name": "x"}, {"drain_timeout_s": 3}],
    ids=str,
)
def test_settings_that_no_engine_is_built_from_change_nothing(settings: dict[str, Any]) -> None:
    assert wanted_version(changed({}), 2) == wanted_version(changed(settings), 2)


def test_the_number_of_engines_that_divide_a_machine_makes_another_version_of_the_same_model() -> None:
    """They have other memory, and so other limits."""
    two, three = (wanted_version(changed({}), number) for number in (2, 3))
    assert two.model == three.model
    assert two.settings != three.settings


def test_each_replica_computes_the_same_from_its_own_copy_of_the_settings() -> None:
    settings = changed({})
    assert wanted_version(pickle.loads(pickle.dumps(settings)), 2) == wanted_version(settings, 2)
    entry = {name: BEFORE[name] for name in ("model", "engine", "lora_adapters")}
    (alone,) = AppSettings.model_validate({"models": [entry]}).each_model()
    assert wanted_version(alone, 2) == wanted_version(settings, 2)


def test_a_model_whose_files_were_replaced_in_place_has_other_files(tmp_path: Path) -> None:
    for seed in ("llama", "qwen2"):
        save_model(seed, tmp_path / seed)
        save_tokenizer(tmp_path / seed)
    link = tmp_path / "current"
    found = []
    for seed in ("llama", "qwen2", "llama"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / seed)
        found.append(files_digest(AppSettings(model=str(link))))
    assert found[0] == found[2] != found[1]
    assert {len(one) for one in found} == {16}


def test_both_forms_of_a_gguf_file_have_its_files(tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "tiny.gguf"))
    forms = ({"quantize": "stored"}, {"quantize": "none"})
    found = {files_digest(AppSettings.model_validate({"model": file, "engine": form})) for form in forms}
    assert len(found) == 1
    assert "" not in found


@pytest.mark.parametrize("settings", [{}, {"engine": {"executor": "fake"}}, {"engine": {"load_format": "dummy"}}])
def test_a_model_without_files_of_its_own_has_none(settings: dict[str, Any]) -> None:
    assert files_digest(AppSettings.model_validate(settings)) == ""
