"""Owns models of the native library whose activations are rounded: their logits, from the settings to the kernels.
Never looks for instructions: the kernels give the same bits by any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build.executor import check_executor, create_executor
from engine.config import EngineConfig
from tests.engine.models.test_integer_rows import save
from tests.engine.models.test_stored_matrix import TOKENS, config, converted
from tests.engine.models.test_stored_matrix import shape as shape  # a fixture of every test here, too
from tests.support.compiler import needs_compiler
from tests.support.packed_models import int_quantized
from tests.support.plans import forced_logits

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))


def logits(directory: Path, chunk: int = 16, **settings: Any) -> Tensor:
    executor, _ = create_executor(directory, config(**settings))
    try:
        return forced_logits(executor, TOKENS, range(8), chunk)
    finally:
        executor.shutdown()


def distance(got: Tensor, want: Tensor) -> float:
    """The root mean square of the difference, as a share of that of `want`."""
    return ((got.double() - want.double()).square().mean() / want.double().square().mean()).sqrt().item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_differ_from_those_of_whole_activations_by_their_rounding(
    dtype: str, tied: bool, tmp_path: Path
) -> None:
    directory = converted(tmp_path, tied=tied)
    want = logits(directory, kernels="reference")
    whole, rounded = (logits(directory, quantize="stored", dtype=dtype, activations=how) for how in ("auto", "int8"))
    assert distance(whole, want) < 0.01
    assert distance(whole, want) < distance(rounded, want) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_rounded_to_int8_go_with_it(dtype: str, tmp_path: Path) -> None:
    directory = converted(tmp_path)
    whole, rounded = (logits(directory, quantize="int8", dtype=dtype, activations=how) for how in ("auto", "int8"))
    assert 0.0 < distance(rounded, whole) < 0.05


def test_so_do_bytes_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, int_quantized(None), monkeypatch)
    whole, rounded = (logits(tmp_path / "packed", quantize="stored", activations=how) for how in ("auto", "int8"))
    assert 0.0 < distance(rounded, whole) < 0.1


@pytest.mark.parametrize("quantize", ["stored", "int8"])
def test_chunks_change_no_bit(quantize: str, tmp_path: Path) -> None:
    directory = converted(tmp_path)
    first, *others = (logits(directory, chunk, quantize=quantize, activations="int8") for chunk in (1, 7, 16, 40))
    assert all(torch.equal(first, other) for other in others)


def test_the_log_says_what_is_rounded_and_by_what_it_is_multiplied(tmp_path: Path) -> None:
    directory = converted(tmp_path)
    told = check_executor(directory, config(quantize="stored", activations="int8")).reasons
    reason = told["activations"]
    assert reason.startswith("asked for; rounded to 8 bits in blocks of 32 for weights of 4 to 8 bits (")
    assert reason.endswith("), and float32 for all others")
    assert "multiplied as bytes (" in told["weights"]
    assert "activations" not in check_executor(directory, config(quantize="stored")).reasons


def test_by_default_no_activation_is_rounded() -> None:
    assert not EngineConfig().rounds_activations
    assert EngineConfig(quantize="stored", activations="int8").rounds_activations
