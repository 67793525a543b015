"""Owns the loading of narrow weights in the layouts of kernels.forward.Linear: no number changes, and what has none of
the layouts is unpacked.
Never multiplies: tests/kernels/triton and tests/engine/execution/gpu do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.config import CheckpointError, read_model_config
from engine.models.narrow import INT8, LISTED, InBlocks, Keep, Kept, Narrow, round_by_output
from engine.models.parameters import DecoderWeights, allocate, checkpoint_table, num_bytes
from engine.models.weights import dummy_weights, load_weights
from kernels import reference
from kernels.cpu.native.grouped import FORMS as OF_GGUF
from kernels.forward import Linear
from tests.support.packed_models import FORMATS, save_packed
from tests.support.tiny_models import edit_tensors, save_model

UNPACKED = ("fp8_blocks",)
Q = "model__layers__0__self_attn__q_proj"


def loaded(directory: Path, keep: Keep = Keep.NARROW, *, rounded: bool = False) -> DecoderWeights:
    return load_weights(directory, read_model_config(directory), torch.float32, keep=keep, rounded=rounded)


def dequantized(linear: Linear) -> torch.Tensor:
    """Return a matrix's weights, or those of all experts."""
    if linear.weight.dim() == 2:
        return reference.dequantize(linear).float()
    return torch.stack([reference.dequantize(linear.of_expert(n)).float() for n in range(len(linear.weight))])


def matrices(weights: DecoderWeights) -> list[Linear]:
    layers = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in weights.layers]
    return [*(linear for layer in layers for linear in layer), weights.lm_head]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in FORMATS
        for kind in ("llama", "phi3", "qwen3_5", "qwen3_moe")
        if kind in ("llama", "phi3") or not name.startswith(("gptq", "awq"))  # its sizes do not fill int32s
    ],
)
def test_every_number_stays_what_it_is_in_stacked_and_turned_matrices_too(name: str, kind: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name, kind)
    narrow, plain = matrices(loaded(tmp_path / "packed")), matrices(loaded(tmp_path / "plain", Keep.NOTHING))
    for number, (got, want) in enumerate(zip(narrow, plain, strict=True)):
        kept = name not in UNPACKED and (number < len(narrow) - 1 or FORMATS[name].packs_head)
        assert (got.scales is not None) is kept
        assert torch.equal(dequantized(got), want.weight), number
        assert (got.order is not None) is (kept and name.endswith("_ordered"))


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


REVERSED = (torch.arange(48) // 16).flip(0).int()


def test_inputs_that_a_checkpoint_lists_out_of_order_are_sorted_by_their_groups(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "gptq_4")
    names = [Q.replace("q_proj", f"{part}_proj") for part in "qkv"]
    edit_tensors(tmp_path / "packed", **{f"{name}__g_idx": REVERSED.clone() for name in names})
    first, second, *_ = loaded(tmp_path / "packed").layers
    assert first.qkv.order.tolist() == [*range(32, 48), *range(16, 32), *range(16)]
    assert (second.qkv.group, second.qkv.order) == (16, None)
    want = loaded(tmp_path / "packed", Keep.NOTHING).layers[0].qkv
    assert torch.equal(reference.dequantize(first.qkv).float(), want.weight)


def test_a_stack_of_which_one_part_has_another_order_is_unpacked(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "gptq_4")
    edit_tensors(tmp_path / "packed", **{f"{Q}__g_idx": REVERSED})
    first, second, *_ = loaded(tmp_path / "packed").layers
    assert (first.qkv.scales, first.qkv.order) == (None, None)
    assert second.qkv.group == 16


def test_groups_of_other_sizes_than_the_formats_are_unpacked(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "gptq_4")
    uneven = torch.tensor([0] * 20 + [1] * 12 + [2] * 16, dtype=torch.int32)
    output = Q.replace("q_proj", "o_proj")
    edit_tensors(tmp_path / "packed", **{f"{output}__g_idx": torch.cat((uneven, uneven + 3))})
    first, second, *_ = loaded(tmp_path / "packed").layers
    assert first.output.scales is None
    assert second.output.group == 16


def test_each_expert_has_the_order_of_inputs_that_its_own_matrix_lists(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "packed_4_ordered", "qwen3_moe")
    own, none = (f"model__layers__0__mlp__experts__{number}__down_proj__weight_g_idx" for number in (1, 2))
    reverse, nothing = (torch.arange(40) // 16).flip(0).int(), torch.full((40,), -1, dtype=torch.int32)
    edit_tensors(tmp_path / "packed", **{own: reverse, none: nothing})
    down = loaded(tmp_path / "packed").layers[0].down
    assert down.order[1].tolist() == [*range(24, 40), *range(8, 24), *range(8)]
    assert down.order[2].tolist() == [*range(40)]
    assert torch.equal(down.order[0], down.order[3])
    assert torch.equal(dequantized(down), loaded(tmp_path / "packed", Keep.NOTHING).layers[0].down.weight)


def test_experts_stay_packed_as_their_shared_one_does(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_by_output", "qwen3_next")
    layers = [layer for layer in loaded(tmp_path / "packed").layers if layer.shared is not None]
    assert layers
    for layer in layers:
        assert layer.shared is not None
        kinds = [linear.weight.dtype for linear in (layer.gate_up, layer.shared.gate_up, layer.shared.down)]
        assert kinds == [torch.int8] * 3
        assert layer.shared.gate.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_are_rounded_one_by_one_and_as_a_stack(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    rounded, plain = (loaded(tmp_path, Keep.NARROW, rounded=each) for each in (True, False))
    for got, want in zip(matrices(rounded), matrices(plain), strict=True):
        if want.weight.dim() == 3:
            assert got.weight.dtype == torch.int8
            for number in range(len(want.weight)):
                values, scales = round_by_output(want.weight[number])
                assert torch.equal(got.weight[number], values)
                assert torch.equal(got.scales[number], scales)


OUTPUT = "model__layers__0__self_attn__o_proj"


def test_a_stack_has_the_largest_scale_of_its_modules_inputs_where_activations_are_rounded(tmp_path: Path) -> None:
    save_packed(tmp_path, tmp_path / "plain", "float_channel")
    given = {Q: torch.tensor(0.5), Q.replace("q_proj", "k_proj"): torch.tensor(2.5), OUTPUT: None}
    edit_tensors(tmp_path, **{f"{name}__input_scale": scale for name, scale in given.items()})
    config = read_model_config(tmp_path)
    first = load_weights(tmp_path, config, torch.float32, keep=Keep.NARROW, round_inputs=True).layers[0]
    assert [linear.input_scale.tolist() for linear in (first.qkv, first.output, first.down)] == [[2.5], [0.0], [1.0]]
    assert loaded(tmp_path).layers[0].qkv.input_scale is None


def test_a_scale_of_inputs_may_have_the_name_that_transformers_gives_it(tmp_path: Path) -> None:
    save_packed(tmp_path, tmp_path / "plain", "fp8_tensor")
    weights = load_weights(tmp_path, read_model_config(tmp_path), torch.float32, keep=Keep.NARROW, round_inputs=True)
    assert [linear.input_scale.tolist() for linear in matrices(weights) if linear.scales is not None] == [[0.5]] * 12


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_a_scale_of_inputs_that_is_no_scale_is_refused_by_name(scale: float, tmp_path: Path) -> None:
    save_packed(tmp_path, tmp_path / "plain", "float_channel")
    edit_tensors(tmp_path, **{f"{OUTPUT}__input_scale": torch.tensor(scale)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.o_proj\.input_scale is .*: expected a positive"):
        load_weights(tmp_path, read_model_config(tmp_path), torch.float32, keep=Keep.NARROW, round_inputs=True)


def test_only_matrices_in_fp8_get_a_scale_of_inputs(tmp_path: Path) -> None:
    save_packed(tmp_path, tmp_path / "plain", "int_by_output")
    weights = load_weights(tmp_path, read_model_config(tmp_path), torch.float32, keep=Keep.NARROW, round_inputs=True)
    assert all(linear.input_scale is None for linear in matrices(weights))


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
    ("modules", "rounded", "want"),
    [
        ({"a": INT8, "b": INT8}, False, INT8),
        ({"a": INT8}, False, None),
        ({"a": INT8, "b": Narrow(torch.int8, 32)}, True, INT8),
        ({"a": Narrow(torch.uint8, 32), "b": Narrow(torch.uint8, 32)}, True, Narrow(torch.uint8, 32)),
        ({"a": Narrow(torch.uint8, 32, order="x"), "b": Narrow(torch.uint8, 32, order="y")}, False, None),
        ({}, True, INT8),
    ],
)
def test_a_matrix_has_a_layout_if_all_its_modules_have_it(
    modules: dict[str, Narrow], rounded: bool, want: Narrow | None
) -> None:
    assert Kept(modules=modules, rounded=rounded).layout(["a", "b"]) == want


FOUR = Narrow(torch.uint8, 32)
Q4, Q6 = InBlocks(OF_GGUF["Q4_K"]), InBlocks(OF_GGUF["Q6_K"])


@pytest.mark.parametrize(
    ("layouts", "rounded", "want"),
    [
        ((FOUR, FOUR, FOUR, FOUR), False, FOUR),
        ((FOUR, FOUR, FOUR, None), False, None),
        ((FOUR, FOUR, FOUR, None), True, INT8),
        ((None, None, None, None), True, INT8),
        ((replace(FOUR, order="x"), replace(FOUR, order="x"), FOUR, FOUR), False, replace(FOUR, order=LISTED)),
        ((replace(FOUR, order="x"), replace(FOUR, order="y"), FOUR, FOUR), False, None),
        ((Q4, Q4, Q4, Q4), True, Q4),
        ((Q4, Q4, Q6, Q6), False, Q6),
        ((Q4, Q6, Q4, Q4), False, None),
        ((Q4, Q4, Q4, None), False, None),
        ((Q4, Q4, None, None), True, INT8),
        ((Q4, Q4, FOUR, FOUR), False, None),
    ],
)
def test_experts_have_a_layout_if_all_have_it_in_any_order_of_inputs(
    layouts: tuple[Narrow | InBlocks | None, ...], rounded: bool, want: Narrow | InBlocks | None
) -> None:
    modules = {name: layout for name, layout in zip("abcd", layouts, strict=True) if layout is not None}
    assert Kept(modules=modules, rounded=rounded).experts_layout([["a", "b"], ["c", "d"]]) == want


def test_groups_that_are_no_multiple_of_sixteen_have_no_kernel() -> None:
    assert Narrow(torch.int8, 20).why_not == "groups of 20 inputs are no multiple of 16"
    assert Narrow(torch.int8, 48).why_not is Narrow(torch.uint8).why_not is None
