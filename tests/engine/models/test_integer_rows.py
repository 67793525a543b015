"""Owns the comparison of packed integers that stay in groups with the same weights unpacked, for each format.
Never trusts the reader's own arithmetic: tests/support/packed_models.py writes every format number by number."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from engine.models.config import read_model_config
from engine.models.fp8_rows import Fp8Rows
from engine.models.integer_rows import IntegerRows
from engine.models.narrow import Keep
from engine.models.packing import Awq, Gguf, Gptq, Grid, Packing, Unpacked
from engine.models.stored_forms import form_of, in_integers, why_unpacked
from engine.models.stored_matrix import StoredExperts, StoredMatrix
from engine.models.weights import load_weights
from kernels.cpu.native.grouped import FORMS, FP8, INTEGERS, Form, Rows, fitting
from tests.engine.models.test_packed_weights import logits
from tests.kernels.rows import seeded_generator
from tests.support import packed_models, tiny_models
from tests.support.compiler import needs_compiler
from tests.support.packed_models import Format, awq, fp8_blocks, gptq, int_quantized, pack_quantized, save_packed

KEPT = {
    "gptq of 4 bits": gptq(4, 32, ordered=False, zeros=True),
    "gptq of 8 bits": gptq(8, 64, ordered=False, zeros=True),
    "gptq of 4 bits by output": gptq(4, None, ordered=False, zeros=False),
    "awq": awq(128),
    "integers in groups": int_quantized(32),
    "integers by output with zero points": int_quantized(None, zeros=True),
    "packed, 4 bits": pack_quantized(4, 128, zeros=False),
    "packed, 4 bits with zero points": pack_quantized(4, 64, zeros=True),
    "packed, 4 bits in a stored order": pack_quantized(4, 32, zeros=False, actorder="weight"),
    "packed, 8 bits": pack_quantized(8, 128, zeros=True),
}
APART = {
    "groups of 16": pack_quantized(4, 16, zeros=False),
    "groups out of order": pack_quantized(4, 32, zeros=False, actorder="group"),
}


def save(
    directory: Path,
    form: Format,
    monkeypatch: pytest.MonkeyPatch,
    kind: str = "llama",
    hidden: int = 128,
    inner: int = 256,
) -> Path:
    for name, size in {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 8}.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, size)
    monkeypatch.setitem(packed_models.FORMATS, "this", form)
    save_packed(directory / "packed", directory / "plain", "this", kind)
    return directory


def stays(directory: Path) -> list[bool]:
    """Return which matrices stay in groups."""
    weights = load_weights(directory, read_model_config(directory), torch.float32, keep=Keep.GROUPED)
    matrices = [linear for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [isinstance(linear.weight, StoredMatrix | StoredExperts) for linear in matrices]


def check_kept(saved: Path) -> None:
    """Check that all matrices stay packed, and that logits are those of the same weights stored plainly."""
    assert all(stays(saved / "packed"))
    got = logits(saved / "packed", "native", quantize="stored")
    torch.testing.assert_close(got, logits(saved / "plain", "reference"), rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_the_same_weights_stored_plainly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, KEPT[name], monkeypatch)
    check_kept(tmp_path)


@needs_compiler
@pytest.mark.parametrize("name", APART)
def test_groups_that_no_panel_has_are_unpacked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, APART[name], monkeypatch)
    assert not any(stays(tmp_path / "packed"))
    got = logits(tmp_path / "packed", "native", quantize="stored")
    torch.testing.assert_close(got, logits(tmp_path / "plain", "reference"), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_projection_whose_heads_are_turned_in_part_is_unpacked_as_one_of_no_whole_blocks_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs are reordered after they are read, which is done in a tensor. The next one has 48 inputs."""
    save(tmp_path, KEPT["gptq of 4 bits"], monkeypatch, "phi3", hidden=96)
    assert stays(tmp_path / "packed")[:4] == [False, False, True, True]
    got = logits(tmp_path / "packed", "native", quantize="stored")
    torch.testing.assert_close(got, logits(tmp_path / "plain", "reference"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("least", [-8, 0])
@pytest.mark.parametrize("run", [32, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_group_stands_for_the_numbers_of_its_format_to_the_bit(least: int, run: int, zeros: bool) -> None:
    generator, groups = seeded_generator(), 256 // run
    values = torch.randint(least, least + 16, (37, 256), generator=generator).float()
    scales = torch.randn(37, groups, generator=generator).half().float()
    points = torch.randint(least, least + 16, (37, groups), generator=generator).float() if zeros else None
    unpacked = Unpacked(values, least, scales, torch.arange(37), torch.arange(256) // run, points)
    rows = IntegerRows.of(unpacked, INTEGERS[4, run])
    order = torch.randperm(37, generator=generator)
    assert torch.equal(rows.take(order).weight(), unpacked.weight()[order])


FORMATS = KEPT | {"fp8 in blocks": fp8_blocks(64, 32)}


@pytest.mark.parametrize("name", FORMATS)
def test_a_loaded_model_takes_no_more_before_it_is_packed_than_its_panels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guard: 4 bits had a byte each until then, twice what the start had found to fit."""
    save(tmp_path, FORMATS[name], monkeypatch)
    config = read_model_config(tmp_path / "packed")
    weights = load_weights(tmp_path / "packed", config, torch.float32, keep=Keep.GROUPED)
    for layer in weights.layers:
        for matrix in (linear.weight for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)):
            assert isinstance(matrix, StoredMatrix)
            assert 0 < sum(map(held, matrix.filled.values())) <= matrix.nbytes


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (22016, 4096), (4096, 11008)])
@pytest.mark.parametrize(("bits", "run"), INTEGERS)
def test_a_matrix_of_a_7b_model_takes_what_its_panels_take_before_it_is_packed(
    bits: int, run: int, outputs: int, inputs: int
) -> None:
    form = INTEGERS[bits, run]
    with torch.device("meta"):
        scales = torch.empty(outputs, inputs // run)
        unpacked = Unpacked(
            torch.empty(outputs, inputs), 0, scales, torch.arange(outputs), torch.arange(inputs) // run, scales
        )
        rows = IntegerRows.of(unpacked, form)
    assert rows.shape == (outputs, inputs)
    assert held(rows) == form.nbytes(outputs, inputs)


def held(rows: Rows) -> int:
    """Return the bytes of all tensors of an IntegerRows or Fp8Rows."""
    assert isinstance(rows, IntegerRows | Fp8Rows)
    return sum(each.nbytes for field in fields(rows) if isinstance(each := getattr(rows, field.name), torch.Tensor))


@pytest.mark.parametrize(
    ("packing", "form"),
    [
        (Awq(group_size=128), INTEGERS[4, 128]),
        (Awq(group_size=None), INTEGERS[4, 128]),
        (Awq(group_size=96), INTEGERS[4, 32]),
        (Awq(group_size=48), None),
        (Gptq(bits=8, group_size=256, ordered=False, zeros_less_one=True, symmetric=False), INTEGERS[8, 128]),
        (Gptq(bits=8, group_size=None, ordered=False, zeros_less_one=True, symmetric=False), INTEGERS[8, 128]),
        (Gptq(bits=4, group_size=128, ordered=True, zeros_less_one=True, symmetric=False), None),
        (Grid(summary="", kind="F8_E4M3", cell=(128, 128)), FP8[128]),
        (Grid(summary="", kind="F8_E4M3", cell=(1, None)), FP8[128]),
        (Grid(summary="", kind="F8_E4M3", cell=(128, 64)), FP8[32]),
        (Grid(summary="", kind="F8_E4M3", cell=(128, 16)), None),
        (Gguf(kind="Q4_K"), FORMS["Q4_K"]),
    ],
    ids=str,
)
def test_only_groups_of_whole_blocks_in_order_stay(packing: Packing, form: Form | None) -> None:
    assert form_of(packing) == form
    assert (why_unpacked(packing) is None) == (form is not None)
    assert in_integers(packing) == (form is not None and not form.fp8)


@pytest.mark.parametrize(
    ("form", "inputs", "found"),
    [
        (FP8[128], 384, FP8[128]),
        (FP8[128], 576, FP8[32]),
        (FP8[32], 100, None),
        (INTEGERS[4, 128], 96, INTEGERS[4, 32]),
        (INTEGERS[8, 128], 576, INTEGERS[8, 32]),
        (FORMS["Q4_K"], 512, FORMS["Q4_K"]),
        (FORMS["Q4_K"], 576, None),
    ],
    ids=str,
)
def test_runs_are_shorter_where_a_matrix_has_no_whole_number_of_them(
    form: Form, inputs: int, found: Form | None
) -> None:
    assert fitting(form, inputs) == found


@needs_compiler
def test_groups_of_which_the_last_is_shorter_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, KEPT["packed, 8 bits"], monkeypatch, hidden=160, inner=352)
    assert all(stays(tmp_path / "packed"))
    got = logits(tmp_path / "packed", "native", quantize="stored")
    torch.testing.assert_close(got, logits(tmp_path / "plain", "reference"), rtol=1e-4, atol=1e-4)
