"""Owns the reading of packed checkpoints: weights are exact to the bit, some stay in 8 bits, and refusals name what is
wrong.
Never trusts the reader's own arithmetic: tests/support/packed_models.py writes every format number by number."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build.executor import create_executor
from engine.config import EngineConfig
from engine.models.config import CheckpointError, read_model_config
from engine.models.narrow import Keep
from engine.models.parameters import checkpoint_table
from engine.models.quantization import read_quantization
from engine.models.weights import load_weights, weight_bytes
from tests.support.compiler import needs_compiler
from tests.support.packed_models import FORMATS, Format, compressed, gptq, int_quantized, save_packed
from tests.support.plans import forced_logits
from tests.support.tiny_models import VOCAB, edit_config, edit_tensors

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
BY_OUTPUT = [name for name, form in FORMATS.items() if form.by_output]


def table(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    config = read_model_config(directory)
    return checkpoint_table(config, load_weights(directory, config, torch.float32, **options))


def logits(directory: Path, kernels: str, dtype: str = "float32", **settings: Any) -> torch.Tensor:
    config = EngineConfig(dtype=dtype, num_kv_blocks=8, num_threads=1, kernels=kernels, **settings)  # type: ignore[arg-type]
    executor, _ = create_executor(directory, config)
    try:
        return forced_logits(executor, TOKENS, range(8), 16)
    finally:
        executor.shutdown()


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_to_the_bit_what_its_format_defines(name: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    got, want = table(tmp_path / "packed"), table(tmp_path / "plain")
    assert got.keys() == want.keys()
    for key, view in got.items():
        assert torch.equal(view, want[key]), key


@pytest.mark.parametrize("keep", [Keep.NOTHING, Keep.NARROW])
def test_packed_decoders_under_the_names_of_a_larger_model_are_read_too(keep: Keep, tmp_path: Path) -> None:
    """They were refused, since only plain tensors had their names mapped."""
    packed, nested = tmp_path / "packed", tmp_path / "nested"
    save_packed(packed, tmp_path / "plain", "int_by_output", "qwen3_5")
    shutil.copytree(packed, nested)
    stored = load_file(packed / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    save_file(renamed, nested / "model.safetensors")
    want, got = table(packed, keep=keep), table(nested, keep=keep)
    assert got.keys() == want.keys()
    for key, view in got.items():
        assert torch.equal(view, want[key]), key
    config = read_model_config(packed)
    assert len({weight_bytes(directory, config, torch.float32, keep=keep) for directory in (packed, nested)}) == 1


@pytest.mark.parametrize("kind", ["phi3", "qwen3_moe", "qwen3_5_vl"])
@pytest.mark.parametrize("name", ["int_by_output", "fp8_blocks"])
def test_stacked_matrices_turned_heads_and_experts_are_unpacked_too(name: str, kind: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name, kind)
    got, want = (logits(tmp_path / which, "torch_cpu") for which in ("packed", "plain"))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gptq_4_ordered", "awq", "fp8_blocks"])
def test_log_probabilities_are_those_of_the_same_weights_stored_plainly(name: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    got, want = (logits(tmp_path / which, "torch_cpu") for which in ("packed", "plain"))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("name", BY_OUTPUT)
def test_eight_bits_with_a_scale_for_each_output_are_computed_with_as_they_are(
    name: str, kind: str, tmp_path: Path
) -> None:
    """In float32 the kernels multiply by the scale after the sum instead of before it, so some last bits differ."""
    if name.startswith("gptq") and kind == "qwen3_moe":
        pytest.skip("its experts' sizes do not fill int32s")
    save_packed(tmp_path / "packed", tmp_path / "plain", name, kind)
    config = read_model_config(tmp_path / "packed")
    kept = load_weights(tmp_path / "packed", config, torch.bfloat16, keep=Keep.BY_OUTPUT).layers[0]
    for linear in (kept.qkv, kept.output, kept.gate_up, kept.down):
        assert linear.weight.dtype == torch.int8
        assert linear.scales.shape == linear.weight.shape[:-1]
    got, want = (logits(tmp_path / which, "native") for which in ("packed", "plain"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [gptq(8, None, ordered=False, zeros=True), int_quantized(None, zeros=True)])
def test_eight_bits_with_a_zero_point_for_each_output_are_unpacked(
    form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value less its zero point may need nine bits. Such checkpoints were refused where the native kernels compute,
    as if they were damaged."""
    monkeypatch.setitem(FORMATS, "zeros", form)
    save_packed(tmp_path / "packed", tmp_path / "plain", "zeros")
    got, want = table(tmp_path / "packed", keep=Keep.BY_OUTPUT), table(tmp_path / "plain")
    assert got.keys() == want.keys()
    for key, view in got.items():
        assert torch.equal(view, want[key]), key


@needs_compiler
def test_values_in_eight_bits_are_not_rounded_anew_and_in_bfloat16_are_closer_than_rounded_weights(
    tmp_path: Path,
) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_by_output")
    exact = logits(tmp_path / "plain", "reference")
    kept, rounded = (logits(tmp_path / which, "native", "bfloat16") for which in ("packed", "plain"))
    kept_off, rounded_off = ((weights - exact).abs().mean() for weights in (kept, rounded))
    assert kept_off < rounded_off, "the values are exact in bfloat16, and their products with scales are not"


@needs_compiler
def test_a_stack_of_which_one_part_is_not_packed_is_computed_in_the_engines_type(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "int_by_output")
    plain = load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    edit_tensors(
        tmp_path / "packed",
        model__layers__0__self_attn__q_proj__weight=plain,
        model__layers__0__self_attn__q_proj__weight_scale=None,
    )
    config = read_model_config(tmp_path / "packed")
    weights = load_weights(tmp_path / "packed", config, torch.float32, keep=Keep.BY_OUTPUT)
    assert [layer.qkv.weight.dtype for layer in weights.layers] == [torch.float32, torch.int8, torch.int8]
    got, want = (logits(tmp_path / which, "native") for which in ("packed", "plain"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("int_by_output", {}, "a scale for each output: kept in 8 bits; activations stay float32, not int8 (dynamic)"),
        ("int_by_output", {"kernels": "torch_cpu"}, "each output: computed in float32; activations stay float32"),
        ("gptq_4", {}, "gptq 4 bit, a scale for 16 inputs of an output: computed in float32"),
        ("gptq_4", {"quantize": "int8"}, "rounded anew to 8 bits (quantize int8); matrices: 13 in 8 bits"),
        ("fp8_blocks", {}, "fp8 e4m3, blocks of 32 x 20: computed in float32; activations stay float32, not fp8 (dyn"),
        ("fp8_blocks", {"load_format": "dummy"}, "random numbers in float32, where the checkpoint has fp8 e4m3"),
    ],
)
def test_the_start_says_what_is_computed_with(name: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    config = EngineConfig(dtype="float32", num_kv_blocks=4, num_threads=1, **settings)
    executor, resolved = create_executor(tmp_path / "packed", config)
    executor.shutdown()
    assert reason in resolved.reasons["weights"]


@needs_compiler
@pytest.mark.parametrize(("name", "free"), [("int_by_output", 4), ("gptq_4", 8)])
def test_tokens_are_free_in_a_step_as_weights_are_read_in_eight_bits_or_more(
    name: str, free: int, tmp_path: Path
) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    executor, resolved = create_executor(tmp_path / "packed", EngineConfig(num_kv_blocks=4, num_threads=1))
    executor.shutdown()
    assert resolved.speculative.free_tokens == free


def test_a_plain_checkpoint_has_no_reason_for_its_weights(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "awq")
    executor, resolved = create_executor(tmp_path / "plain", EngineConfig(num_kv_blocks=4, num_threads=1))
    executor.shutdown()
    assert "weights" not in resolved.reasons


# --- what is broken -------------------------------------------------------------------------------------------------

Q = "model__layers__1__self_attn__q_proj"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq_4", {f"{Q}__scales": None}, r"layers\.1\.self_attn\.q_proj\.scales is missing, which gptq 4 bit"),
        ("gptq_4", {f"{Q}__qweight": None}, r"q_proj\.qweight is missing, which gptq 4 bit"),
        ("gptq_4_ordered", {f"{Q}__g_idx": None}, r"q_proj\.g_idx is missing"),
        ("gptq_4", {f"{Q}__scales": torch.ones(2, 96)}, r"q_proj\.scales has shape \[2, 96\], but gptq .* \[3, 96\]"),
        ("gptq_4", {f"{Q}__qzeros": torch.ones(3, 12)}, r"q_proj\.qzeros is F32; gptq 4 bit.* has I32"),
        (
            "gptq_4_ordered",
            {f"{Q}__g_idx": torch.full((48,), 3, dtype=torch.int32)},
            r"q_proj\.g_idx names groups 3 to 3, and there are 3",
        ),
        ("gptq_4", {f"{Q}__bias": torch.ones(96)}, r"unexpected tensor model\.layers\.1\.self_attn\.q_proj\.bias"),
        ("awq", {f"{Q}__qzeros": None}, r"q_proj\.qzeros is missing, which awq 4 bit"),
        ("awq", {f"{Q}__scales": torch.full((3, 96), torch.inf)}, r"q_proj\.scales has numbers that are not finite"),
        ("int_by_output", {f"{Q}__weight_scale": None}, r"q_proj\.weight_scale is missing"),
        ("int_by_output", {f"{Q}__weight": torch.ones(96, 48)}, r"q_proj\.weight is F32; compressed-tensors int.* I8"),
        ("packed_4", {f"{Q}__weight_shape": torch.tensor([96, 40])}, r"q_proj\.weight_shape is \[96, 40\], but config"),
        ("packed_4_zeros", {f"{Q}__weight_zero_point": None}, r"q_proj\.weight_zero_point is missing"),
        ("float_tensor", {f"{Q}__weight_scale": None}, r"q_proj\.weight_scale is missing"),
        (
            "fp8_blocks",
            {f"{Q}__weight_scale_inv": torch.ones(3, 2)},
            r"weight_scale_inv has shape \[3, 2\], .* \[3, 3\]",
        ),
        ("packed_4", {"lm_head__weight_scale": torch.ones(211, 3)}, "quantization_config does not cover lm_head"),
        (
            "fp8_blocks",
            {"model__norm__weight_scale_inv": torch.ones(1)},
            r"model\.norm is packed .* is not two-dimensional",
        ),
        (
            "awq",
            {"model__layers__1__self_attn__o_proj__qweight": torch.ones(3, dtype=torch.int32)},
            r"o_proj\.qweight has",
        ),
        ("gptq_8_by_output", {f"{Q}__qzeros": torch.zeros(1, 24, dtype=torch.int32)}, "beyond 8 bits"),
    ],
)
def test_a_broken_tensor_is_refused_by_its_name(
    name: str, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    edit_tensors(tmp_path / "packed", **changes)
    with pytest.raises(CheckpointError, match=message):
        table(tmp_path / "packed", keep=Keep.BY_OUTPUT)


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "awq")
    path = tmp_path / "packed" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        table(tmp_path / "packed")


def test_sizes_that_fill_no_int32_are_refused(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "awq")
    edit_config(tmp_path / "packed", num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    with pytest.raises(CheckpointError, match=r"k_proj cannot be packed \(awq 4 bit.*4 outputs is not a multiple of 8"):
        table(tmp_path / "packed")


# --- what is not read -----------------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "mxfp4"},
            r"quantization_config \(mxfp4\) is not supported; supported are compressed-tensors",
        ),
        ({"load_in_4bit": True}, r"quantization_config \(unknown\) is not supported"),
        (["gptq"], "expected an object"),
        (GPTQ | {"bits": 3}, r"\(gptq\): bits is 3; supported are 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported are gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (
            GPTQ | {"dynamic": {".*attn.*": {"bits": 8}}},
            r"dynamic has \{'bits': 8\} for \.\*attn\.\*, which is not supp",
        ),
        (GPTQ | {"dynamic": {"+:.*attn.*": {"bits": 8}}}, r"dynamic has \{'bits': 8\} for \+:"),
        (GPTQ | {"dynamic": ["-:.*attn.*"]}, "dynamic is .*: expected an object"),
        (GPTQ | {"group_size": 0}, "group_size is 0: expected a positive integer, or -1"),
        (AWQ | {"bits": 8}, r"\(awq\): bits is 8; supported is 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; supported is gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False; supported is True"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; supported are e4m3"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (
            compressed("int-quantized", INT) | {"kv_cache_scheme": {"num_bits": 8}},
            "kv_cache_scheme is .* not supported",
        ),
        (compressed("int-quantized", INT) | {"transform_config": {"a": 1}}, "transform_config is"),
        (compressed("sparse-24-bitmask", INT), "format is 'sparse-24-bitmask'; supported are int-quantized, float"),
        (
            compressed("int-quantized", INT) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format is 'sparse-24",
        ),
        (compressed("marlin-24", INT4), "format is 'marlin-24'"),
        (compressed("pack-quantized", INT4 | {"num_bits": 3}), "num_bits is 3; supported are 4, 8"),
        (compressed("int-quantized", INT4), "num_bits is 4; supported is 8"),
        (compressed("float-quantized", INT), "type is 'int'; supported is float"),
        (compressed("pack-quantized", INT4 | {"actorder": "strange"}), "actorder is 'strange'"),
        (
            compressed("pack-quantized", INT4 | {"strategy": "token"}),
            "strategy is 'token'; supported are tensor, channel",
        ),
        (compressed("int-quantized", INT | {"dynamic": True}), "dynamic is True; supported is False"),
        (compressed("int-quantized", INT) | {"ignore": ["re:("]}, r"'re:\(' is not a valid regular expression"),
        (compressed("int-quantized", INT) | {"config_groups": {}}, r"config_groups is \{\}"),
    ],
)
def test_a_variant_that_is_not_read_is_refused_with_those_that_are(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": config})


def test_what_gptq_leaves_unpacked_is_seen_by_its_tensors(tmp_path: Path) -> None:
    """Qwen3.5's own GPTQ checkpoints list it, and were refused."""
    unpacked = {"-:.*attn.*": {}, "-:.*mtp.*": {}, "lm_head": {}, "model.language_model.embed_tokens": {}}
    save_packed(tmp_path / "packed", tmp_path / "plain", "gptq_4")
    mixed, plain = load_file(tmp_path / "packed" / "model.safetensors"), load_file(tmp_path / "plain/model.safetensors")
    mixed = {name: tensor for name, tensor in mixed.items() if "attn" not in name}
    mixed |= {name: tensor for name, tensor in plain.items() if "attn" in name}
    save_file(mixed, tmp_path / "packed" / "model.safetensors")
    edit_config(tmp_path / "packed", quantization_config=FORMATS["gptq_4"].config | {"dynamic": unpacked})
    got, want = table(tmp_path / "packed"), table(tmp_path / "plain")
    assert got.keys() == want.keys()
    for key, view in got.items():
        assert torch.equal(view, want[key]), key


def test_groups_have_their_targets_by_name_before_all_others() -> None:
    config = compressed("int-quantized", INT)
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*down_proj$", "model.layers.0.self_attn.o_proj"],
        "weights": INT4,
        "format": "pack-quantized",
    }
    found = read_quantization({"quantization_config": config})
    assert found is not None
    mains = {
        name: packing.main if (packing := found.packing(name)) else None
        for name in ("model.layers.3.mlp.down_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj")
    }
    assert list(mains.values()) == ["weight_packed", "weight_packed", "weight"]
    assert found.packing("lm_head") is None
    assert found.packing("model.layers.3.mlp.gate") is None


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("others", [["Linear"], ["re:.*proj$"], ["re:.*mlp.*"]])
def test_of_several_groups_the_most_exact_target_counts_whatever_their_order(others: list[str], order: int) -> None:
    """As in compressed-tensors, which writes such files. A pattern of an earlier group came before a name, and the
    matrix was refused, since its tensors are of the other format."""
    narrow = {"targets": ["model.layers.0.mlp.down_proj", "re:.*.down_proj$"], "weights": INT4}
    groups = {"a": narrow | {"format": "pack-quantized"}, "b": {"targets": others, "weights": INT}}
    config = compressed("int-quantized", INT) | {"config_groups": dict(list(groups.items())[::order])}
    found = read_quantization({"quantization_config": config})
    assert found is not None
    packings = [
        found.packing(f"model.layers.{layer}.mlp.{name}") for layer in (0, 1) for name in ("down_proj", "up_proj")
    ]
    mains = [packing.main for packing in packings if packing is not None]
    assert mains == ["weight_packed", "weight", "weight_packed", "weight"]


def test_weights_without_a_quantization_config_are_as_they_are() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None
