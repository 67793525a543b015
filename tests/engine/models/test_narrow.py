"""Owns the loading of narrow weights in the layouts of kernels.forward.Linear: no number changes, and what has none of
the layouts is unpacked.
Never multiplies: tests/kernels/triton and tests/engine/execution/gpu do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.config import read_model_config
from engine.models.narrow import INT8, Keep, Kept, Narrow, round_by_output
from engine.models.parameters import DecoderWeights, allocate, checkpoint_table, num_bytes
from engine.models.weights import dummy_weights, load_weights
from kernels import reference
from kernels.forward import Linear
from tests.support.packed_models import FORMATS, save_packed
from tests.support.tiny_models import edit_tensors, save_model

UNPACKED = ("gptq_4_ordered", "packed_4_ordered", "fp8_blocks")
Q = "model__layers__0__self_attn__q_proj"


def loaded(directory: Path, keep: Keep = Keep.NARROW, *, rounded: bool = False) -> DecoderWeights:
    return load_weights(directory, read_model_config(directory), torch.float32, keep=keep, rounded=rounded)


def matrices(weights: DecoderWeights) -> list[Linear]:
    layers = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in weights.layers]
    return [*(linear for layer in layers for linear in layer), weights.lm_head]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in FORMATS
        for kind in ("llama", "phi3", "qwen3_5")
        if kind != "qwen3_5" or not name.startswith(("gptq", "awq"))  # its sizes do not fill int32s
    ],
)
def test_every_number_stays_what_it_is_in_stacked_and_turned_matrices_too(name: str, kind: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name, kind)
    narrow, plain = matrices(loaded(tmp_path / "packed")), matrices(loaded(tmp_path / "plain", Keep.NOTHING))
    for number, (got, want) in enumerate(zip(narrow, plain, strict=True)):
        kept = name not in UNPACKED and (number < len(narrow) - 1 or FORMATS[name].packs_head)
        assert (got.scales is not None) is kept
        found = reference.dequantize(got).float() if kept else got.weight
        assert torch.equal(found, want.weight), number


def test_a_stack_whose_parts_are_stored_otherwise_is_unpacked(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_groups")
    plain = load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    edit_tensors(tmp_path / "packed", **{f"{Q}__weight": plain, f"{Q}__weight_scale": None})
    first, second, *_ = loaded(tmp_path / "packed").layers
    assert (first.qkv.weight.dtype, first.qkv.scales) == (torch.float32, None)
    assert second.qkv.weight.dtype == first.output.weight.dtype == torch.int8
    assert torch.equal(first.qkv.weight, loaded(tmp_path / "plain", Keep.NOTHING).layers[0].qkv.weight)


def test_such_a_stack_is_rounded_anew_if_all_others_are_rounded(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_groups")
    plain = load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    edit_tensors(tmp_path / "packed", **{f"{Q}__weight": plain, f"{Q}__weight_scale": None})
    first = loaded(tmp_path / "packed", rounded=True).layers[0]
    want = reference.round_weight(loaded(tmp_path / "plain", Keep.NOTHING).layers[0].qkv.weight)
    assert (first.qkv.group, first.output.group) == (None, 16)
    torch.testing.assert_close(reference.dequantize(first.qkv), want, rtol=1e-6, atol=1e-6)


def test_groups_that_a_checkpoint_lists_out_of_order_are_unpacked(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "gptq_4")
    edit_tensors(tmp_path / "packed", **{f"{Q}__g_idx": (torch.arange(48) // 16).flip(0).int()})
    first, second, *_ = loaded(tmp_path / "packed").layers
    assert first.qkv.scales is None
    assert second.qkv.group == 16


def test_experts_are_unpacked_and_their_shared_one_is_not(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_by_output", "qwen3_next")
    layers = [layer for layer in loaded(tmp_path / "packed").layers if layer.shared is not None]
    assert layers
    for layer in layers:
        assert layer.shared is not None
        kinds = [linear.weight.dtype for linear in (layer.gate_up, layer.shared.gate_up, layer.shared.down)]
        assert kinds == [torch.float32, torch.int8, torch.int8]
        assert layer.shared.gate.weight.dtype == torch.float32


def test_rounding_is_that_of_the_reference_and_an_output_of_zeros_stays_zero() -> None:
    weight = torch.randn(20, 33, generator=torch.Generator().manual_seed(7))
    weight[3] = 0
    values, scales = round_by_output(weight)
    assert values.abs().amax(dim=1).tolist() == [0 if number == 3 else 127 for number in range(20)]
    rounded = reference.dequantize(Linear(values, scales=scales))
    torch.testing.assert_close(rounded, reference.round_weight(weight), rtol=1e-6, atol=1e-6)


def test_dummy_weights_are_rounded_too(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path)
    config = read_model_config(tmp_path)
    plain, rounded = (dummy_weights(config, torch.float32, rounded=each) for each in (False, True))
    for got, want in zip(matrices(rounded), matrices(plain), strict=True):
        assert got.weight.dtype == torch.int8
        off = (reference.dequantize(got) - want.weight).abs()
        assert (off <= got.scales.unsqueeze(1) * 0.501).all()
        assert off.any()
    assert torch.equal(rounded.embedding, plain.embedding)


def test_bytes_are_counted_as_they_are_held(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config, four = read_model_config(tmp_path), Narrow(torch.uint8, 16, zeros=True)
    names = [name.removesuffix(".weight") for name in checkpoint_table(config, allocate(config, torch.bfloat16))]
    projections = [name for name in names if name.endswith("_proj")]
    wide, narrow = (
        num_bytes(config, allocate(config, torch.bfloat16, torch.device("meta"), kept))
        for kept in (None, Kept(modules=dict.fromkeys(projections, four)))
    )
    shapes = [(160, 48), (48, 96), (160, 48), (48, 80)]  # of each of three layers
    numbers = 3 * sum(outputs * inputs for outputs, inputs in shapes)
    groups = 3 * sum(outputs * (inputs // 16) for outputs, inputs in shapes)
    assert wide - narrow == 2 * numbers - (numbers // 2 + 5 * groups)


@pytest.mark.parametrize(
    ("modules", "of_expert", "rounded", "want"),
    [
        ({"a": INT8, "b": INT8}, False, False, INT8),
        ({"a": INT8}, False, False, None),
        ({"a": INT8, "b": Narrow(torch.int8, 32)}, False, True, INT8),
        ({"a": Narrow(torch.uint8, 32), "b": Narrow(torch.uint8, 32)}, False, True, Narrow(torch.uint8, 32)),
        ({"a": INT8, "b": INT8}, True, False, None),
        ({}, True, True, None),
        ({}, False, True, INT8),
    ],
)
def test_a_matrix_has_a_layout_if_all_its_modules_have_it(
    modules: dict[str, Narrow], of_expert: bool, rounded: bool, want: Narrow | None
) -> None:
    kept = Kept(modules=modules, experts=False, rounded=rounded)
    assert kept.layout(["a", "b"], of_expert=of_expert) == want


def test_groups_that_are_no_multiple_of_sixteen_have_no_kernel() -> None:
    assert Narrow(torch.int8, 20).why_not == "groups of 20 inputs are no multiple of 16"
    assert Narrow(torch.int8, 48).why_not is Narrow(torch.uint8).why_not is None
