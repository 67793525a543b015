"""Owns the contract of `quantize: auto` on a CPU: where a checkpoint's bits stay, why, and that it refuses nothing.
Never computes a step: the start's checks say what it would serve."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.build import cpu, stored_weights
from engine.build.executor import check_executor
from engine.build.host_fit import weights_on_host
from engine.checkpoints import gguf_form
from engine.checkpoints.gguf_convert import convert_gguf
from engine.checkpoints.prepare import prepare_model
from engine.config import ConfigError, EngineConfig, ResolvedConfig, SpeculativeConfig
from engine.execution.device import choose_device
from kernels.cpu import processor
from tests.engine.models.test_integer_rows import save
from tests.engine.models.test_stored_matrix import converted
from tests.engine.models.test_stored_matrix import shape as shape  # of the tiny file
from tests.support.compiler import needs_compiler
from tests.support.packed_models import awq, int_quantized

pytestmark = needs_compiler

VNNI = frozenset({"avx512_vnni"})


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor that multiplies bytes and has no matrix unit."""
    monkeypatch.setattr(processor, "cpu_flags", lambda: VNNI)
    monkeypatch.setattr(cpu, "cpu_flags", lambda: VNNI)
    report_unit(monkeypatch, 0)
    return monkeypatch


def report_unit(patch: pytest.MonkeyPatch, found: int) -> None:
    """Let the library report a matrix unit as in kernels.choice.MATRIX_UNITS: none, in use, refused."""
    patch.setattr(stored_weights, "load_library", lambda: SimpleNamespace(matrix_unit=lambda: found))


@pytest.fixture
def matrix_unit(flags: pytest.MonkeyPatch) -> None:
    flags.setattr(processor, "cpu_flags", lambda: VNNI | {gguf_form.MATRIX_UNIT})
    report_unit(flags, 1)


def resolved(directory: Path, **settings: Any) -> ResolvedConfig:
    asked: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 8, "num_threads": 1}
    return check_executor(directory, EngineConfig(**asked | settings))


def test_a_gguf_files_matrices_stay_in_its_bits_without_being_asked_for(tmp_path: Path) -> None:
    directory = converted(tmp_path)
    found, asked = resolved(directory), resolved(directory, quantize="stored")
    assert found.quantize == asked.quantize == "stored"
    assert found.reasons["quantize"].startswith("stored: the checkpoint has its matrices in 4 to 8 bits")
    assert "quantize" not in asked.reasons
    assert found.reasons["weights"] == asked.reasons["weights"]
    assert found.speculative == asked.speculative


def test_packed_integers_in_groups_stay_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, awq(32), monkeypatch)
    assert resolved(tmp_path / "packed").quantize == "stored"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kernels": "torch_cpu"}, "none: the kernels are torch_cpu, and only the native ones"),
        ({"kernels": "reference"}, "none: the kernels are reference, and only the native ones"),
        ({"load_format": "dummy"}, "none: load_format is dummy, and random numbers are drawn in the type of dtype"),
    ],
    ids=str,
)
def test_where_they_cannot_stay_the_default_unpacks_them_and_says_why(
    settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    found = resolved(converted(tmp_path), **settings)
    assert found.quantize == "none"
    assert found.reasons["quantize"].startswith(why)


@pytest.mark.parametrize("settings", [{"kernels": "torch_cpu"}, {"max_loras": 2, "kernels": "torch_cpu"}], ids=str)
def test_what_the_default_gives_up_is_refused_when_it_is_asked_for(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantize is stored, but"):
        resolved(converted(tmp_path), quantize="stored", **settings)


def test_weights_that_no_format_packs_and_those_kept_by_output_anyway_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, int_quantized(None), monkeypatch)
    plain, packed = resolved(tmp_path / "plain"), resolved(tmp_path / "packed")
    assert plain.quantize == packed.quantize == "none"
    assert plain.reasons["quantize"] == "none: the weights are not packed"
    assert packed.reasons["quantize"].startswith("none: the weights are compressed-tensors")
    assert packed.reasons["weights"] == resolved(tmp_path / "packed", quantize="none").reasons["weights"]


def test_a_file_that_was_prepared_in_bfloat16_is_not_said_to_have_no_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    converted(tmp_path)
    directory = prepare_model(str(tmp_path / "tiny.gguf"), progress=False, stored=False)
    assert resolved(directory).reasons["quantize"].startswith("none: the GGUF file was prepared in bfloat16")


@pytest.mark.usefixtures("matrix_unit")
def test_a_matrix_unit_gets_bfloat16_unless_it_has_nothing_to_multiply(tmp_path: Path) -> None:
    directory = converted(tmp_path)
    found = resolved(directory)
    assert found.quantize == "none"
    assert found.reasons["quantize"] == (
        "none: this processor's matrix unit (AMX) multiplies weights in bfloat16 faster"
    )
    assert resolved(directory, dtype="float32").quantize == "stored"
    assert resolved(directory, activations="int8").quantize == "stored"
    assert resolved(directory, quantize="stored").quantize == "stored"


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("found", [0, 2], ids=["not compiled", "not granted"])
def test_a_matrix_unit_that_the_library_does_not_use_is_no_reason(
    found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_unit(monkeypatch, found)
    assert resolved(converted(tmp_path)).quantize == "stored"


def test_rounded_activations_need_no_other_setting_where_the_weights_are_packed(tmp_path: Path) -> None:
    found = resolved(converted(tmp_path), activations="int8")
    assert found.quantize == "stored"
    assert "rounded to 8 bits" in found.reasons["activations"]


def test_rounded_activations_of_weights_that_are_not_packed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, awq(32), monkeypatch)
    with pytest.raises(ConfigError, match="activations is int8, but the weights are not packed"):
        resolved(tmp_path / "plain", activations="int8")


def test_a_draft_models_weights_are_held_as_its_own_checkpoint_allows(tmp_path: Path) -> None:
    directory, plain = converted(tmp_path), tmp_path / "plain"
    plain.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", plain, progress=False)
    costs: dict[Path, float | None] = {}
    for model, draft in ((directory, plain), (plain, directory)):
        speculative = SpeculativeConfig(method="draft_model", model=str(draft))
        asked = EngineConfig(device="cpu", dtype="bfloat16", num_kv_blocks=8, num_threads=1, speculative=speculative)
        start = cpu.start_on_cpu(model, asked, choose_device(asked), engines=1)
        assert start.draft is not None
        found = {model: start.config.quantize, draft: start.draft.config.quantize}
        weights = {
            where: weights_on_host(where, one, own, torch.float32, native=True)
            for where, one, own in (
                (model, start.model, start.config),
                (draft, start.draft.checkpoint.model, start.draft.config),
            )
        }
        start.release()
        costs[draft] = start.resolved.speculative.model_cost
        reason = start.resolved.reasons["quantize of the draft model"]
        assert reason.startswith(f"{found[draft]}: ")
        assert found == {directory: "stored", plain: "none"}
        assert weights[directory] < 0.5 * weights[plain]
    assert 0.25 < (costs[directory] or 0) < 0.5, "a pass is bound by the bytes that it reads, in 4 to 8 bits of 16"
    assert costs[plain] == pytest.approx(1 / (costs[directory] or 0))
