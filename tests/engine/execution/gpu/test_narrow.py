"""Owns packed checkpoints and quantize: int8 on a device: texts are those of the unpacked weights, and bytes are few.
Never needs a GPU: Triton's interpreter multiplies, and captures are made on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.build.executor import create_executor
from engine.build.gpu import start_on_device
from engine.config import ConfigError, EngineConfig, ResolvedConfig
from engine.execution.gpu.executor import DeviceExecutor
from engine.step import GraphUse, StepPlan
from kernels import reference
from kernels.choice import TRITON_TABLE
from kernels.eager.ops import TORCH
from kernels.forward import Linear
from tests.support.fake_device import FakeDevice
from tests.support.packed_models import FORMATS, save_packed
from tests.support.plans import decode, forced_logits
from tests.support.tiny_models import VOCAB, edit_tensors, save_model

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

from kernels.triton.shared.pack import Packed  # isort: skip
from kernels.triton.ops import TRITON  # isort: skip

TOKENS = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = (9,)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 12, "num_threads": 1}
LIMITS: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 12}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
OTHERWISE = {"fp8_blocks": "groups of 20 inputs are no multiple of 16"}
"""The formats that are unpacked while they are loaded, and why."""
KEPT = {
    **dict.fromkeys(("gptq_4", "gptq_4_v2", "awq", "packed_4", "packed_4_zeros", "packed_4_weight"), "4 bits"),
    **dict.fromkeys(("gptq_8", "gptq_8_by_output", "int_by_output", "int_groups", "packed_8"), "8 bits"),
    **dict.fromkeys(("float_tensor", "float_channel", "fp8_tensor", "fp8_blocks_16"), "fp8"),
    **dict.fromkeys(("gptq_4_ordered", "packed_4_ordered"), "4 bits, in the order of the inputs' groups"),
}

USUAL = ("gptq_4_ordered", "int_by_output", "packed_4_zeros", "fp8_blocks_16")
"""The formats that every run covers; each takes seconds in the interpreter."""


@pytest.fixture
def _narrow_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only products with narrow weights run in the interpreter, which takes seconds for a whole model."""
    table = SimpleNamespace(TRITON=replace(TORCH, narrow=TRITON.narrow, experts_capturable=True))
    monkeypatch.setitem(sys.modules, "table_of_a_test", table)  # type: ignore[arg-type]
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", "table_of_a_test")


def on_device(directory: Path, **settings: Any) -> tuple[DeviceExecutor, ResolvedConfig]:
    config = EngineConfig(**SETTINGS | LIMITS | {"attention": "torch"} | settings)
    return start_on_device(directory, config, FakeDevice(), "a test").build()


def device_logits(directory: Path, **settings: Any) -> tuple[Tensor, ResolvedConfig, list[Linear]]:
    """Return the logits of TOKENS, the resolved config, and the matrices of all layers and the LM head."""
    executor, resolved = on_device(directory, **settings)
    found = forced_logits(executor, TOKENS, BLOCKS)
    matrices = matrices_of(executor)
    executor.shutdown()
    return found, resolved, matrices


def matrices_of(executor: DeviceExecutor) -> list[Linear]:
    weights = executor.model.decoder.weights
    found = []
    for layer in weights.layers:
        found += [layer.qkv, layer.output, layer.gate_up, layer.down]
        found += [] if layer.shared is None else [layer.shared.gate_up, layer.shared.down]
    return [*found, weights.lm_head]


def cpu_logits(directory: Path) -> Tensor:
    executor, _ = create_executor(directory, EngineConfig(device="cpu", kernels="torch_cpu", **SETTINGS))
    found = forced_logits(executor, TOKENS, BLOCKS)
    executor.shutdown()
    return found


def same_text(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, **CLOSE)
    assert torch.equal(got.argmax(dim=1), want.argmax(dim=1))


def test_every_format_either_stays_packed_or_is_known_not_to() -> None:
    assert {*KEPT, *OTHERWISE} == {*FORMATS}


@pytest.mark.usefixtures("_narrow_by_triton")
@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_each_format_gives_the_text_of_the_same_weights_unpacked(name: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    got, resolved, matrices = device_logits(tmp_path / "packed")
    same_text(got, cpu_logits(tmp_path / "plain"))
    packed = [linear for linear in matrices if isinstance(linear.weight, Packed)]
    assert len(packed) == (0 if name in OTHERWISE else 13 if FORMATS[name].packs_head else 12)
    reason = resolved.reasons["weights"]
    if name in OTHERWISE:
        assert f"computed in float32, because {OTHERWISE[name]}" in reason
        assert reason.endswith("; matrices: 13 in float32")
    else:
        assert f": kept in {KEPT[name]}" in reason
        assert f"; matrices: {len(packed)} in {KEPT[name].partition(',')[0]}" in reason
        assert all((linear.order is not None) is name.endswith("_ordered") for linear in packed)


@pytest.mark.usefixtures("_narrow_by_triton")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("packed_4_zeros", 4), ("int_by_output", 8), ("fp8_blocks_16", 8)])
def test_a_device_holds_as_many_bytes_as_the_numbers_have_bits(name: str, bits: int, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    _, _, matrices = device_logits(tmp_path / "packed")
    found = [linear for linear in matrices if isinstance(linear.weight, Packed)]
    assert found
    for packed in (linear.weight for linear in found):
        outputs, runs = len(packed.words), -(-packed.inputs // (256 // bits))
        groups = -(-packed.inputs // packed.group) if packed.group else 1
        assert packed.words.nbytes == outputs * runs * 32
        assert packed.scales.nbytes == outputs * groups * 4
        assert packed.zeros is None or packed.zeros.nbytes == outputs * groups


@pytest.mark.usefixtures("_narrow_by_triton")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("packed_4_zeros", "phi3"),
        ("int_by_output", "llama_biased"),
        ("int_by_output", "qwen3_moe"),
        ("fp8_blocks_16", "qwen3_5"),
        *(pytest.param(name, "qwen3_next", marks=pytest.mark.slow) for name in ("packed_4_zeros", "fp8_blocks_16")),
    ],
)
def test_stacked_turned_biased_and_linear_layers_and_experts_stay_packed(name: str, kind: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name, kind)
    got, resolved, matrices = device_logits(tmp_path / "packed")
    same_text(got, cpu_logits(tmp_path / "plain"))
    *matrices, head = matrices
    assert isinstance(head.weight, Packed) is FORMATS[name].packs_head
    assert all(isinstance(linear.weight, Packed) for linear in matrices)
    assert any(linear.weight.words.dim() == 3 for linear in matrices) is ("moe" in kind or "next" in kind)
    assert f": kept in {KEPT[name]}" in resolved.reasons["weights"]


# --- rounded while they are loaded ------------------------------------------------------------------------------------


def save_rounded(directory: Path, kind: str, rounded: Path) -> None:
    """Save a model, and one whose matrices are rounded to 8 bits, but for embedding, routers and gates."""
    save_model(kind, directory)
    save_model(kind, rounded)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not any(part in name for part in ("embed", "mlp.gate.", "expert_gate")):
            tensors[name] = reference.round_weight(tensor).float()
        if tensor.dim() == 3 and "experts" in name:
            tensors[name] = torch.stack([reference.round_weight(expert).float() for expert in tensor])
    save_file(tensors, rounded / "model.safetensors")


@pytest.mark.usefixtures("_narrow_by_triton")
@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_quantize_int8_computes_with_weights_rounded_by_output(kind: str, tmp_path: Path) -> None:
    save_rounded(tmp_path / "plain", kind, tmp_path / "rounded")
    got, resolved, matrices = device_logits(tmp_path / "plain", quantize="int8")
    same_text(got, cpu_logits(tmp_path / "rounded"))
    assert all(isinstance(linear.weight, Packed) for linear in matrices)
    assert resolved.reasons["weights"] == "rounded to 8 bits (quantize int8); matrices: 13 in 8 bits"


@pytest.mark.usefixtures("_narrow_by_triton")
def test_a_tied_head_is_rounded_and_the_embedding_is_not(tmp_path: Path) -> None:
    save_model("llama_tied", tmp_path / "model")
    executor, _ = on_device(tmp_path / "model", quantize="int8")
    weights = executor.model.decoder.weights
    executor.shutdown()
    stored = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights.embedding, stored)
    hidden = torch.eye(stored.shape[1])
    got = TRITON.narrow.linear(hidden, weights.lm_head)  # type: ignore[union-attr]
    torch.testing.assert_close(got.T, reference.round_weight(stored).float(), **CLOSE)


@pytest.mark.usefixtures("_narrow_by_triton")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("packed_4", "kept in 4 bits"),
        ("fp8_blocks", r"rounded anew to 8 bits \(quantize int8\), because groups of 20 inputs"),
    ],
)
def test_quantize_int8_leaves_what_stays_packed_and_rounds_the_rest(name: str, way: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    _, resolved, matrices = device_logits(tmp_path / "packed", quantize="int8")
    kinds = {linear.weight.kind for linear in matrices}
    assert kinds == ({"int4", "int8"} if name == "packed_4" else {"int8"}), "the LM head is not packed"
    assert f": {way}".replace("\\", "") in resolved.reasons["weights"]


def test_without_triton_quantize_int8_is_refused_and_packed_weights_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", "kernels.triton.absent")
    save_packed(tmp_path / "packed", tmp_path / "plain", "awq")
    why = "quantize is int8, but torch's operators compute the matrix products: without Triton, a GPU does not"
    with pytest.raises(ConfigError, match=why):
        on_device(tmp_path / "packed", quantize="int8")
    got, resolved, _ = device_logits(tmp_path / "packed")
    same_text(got, cpu_logits(tmp_path / "plain"))
    assert "an output: computed in float32; matrices: 13 in float32" in resolved.reasons["weights"]


# --- activations in fp8 -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("_narrow_by_triton")
def test_many_tokens_are_rounded_to_fp8_on_request_and_few_are_not(tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", "float_channel")
    edit_tensors(tmp_path / "packed", **dict.fromkeys(input_scales(tmp_path / "packed")))
    longer = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    found = {}
    for asked in ("auto", "fp8"):
        executor, resolved = on_device(tmp_path / "packed", activations=asked, max_num_batched_tokens=80)
        found[asked] = [forced_logits(executor, tokens, range(6)) for tokens in (longer, longer[:12])]
        executor.shutdown()
    assert "activations are rounded to fp8 for many tokens, otherwise they stay float32" in resolved.reasons["weights"]
    many, few = zip(found["auto"], found["fp8"], strict=True)
    assert torch.equal(*few)
    assert not torch.equal(*many)
    off = (many[0].log_softmax(1) - many[1].log_softmax(1)).abs().mean()
    assert off < 0.3, "e4m3 has three bits of mantissa"


def input_scales(directory: Path) -> list[str]:
    names = load_file(directory / "model.safetensors")
    return [name.replace(".", "__") for name in names if name.endswith("input_scale")]


# --- captured ---------------------------------------------------------------------------------------------------------


def captured_steps(directory: Path, names: Sequence[str]) -> Tensor:
    """Return the logits of the last tokens, decoded one by one by a captured step."""
    executor, _ = on_device(directory, attention="triton", cuda_graphs="decode", cuda_graph_decode_rows=(2,))
    forced_logits(executor, TOKENS[:10], BLOCKS)
    found = []
    for position, name in zip(range(10, 12), names, strict=True):
        plan = StepPlan(0, (decode("a", TOKENS[position], position, BLOCKS),))
        found.append(executor.logits(plan).float())
        executor.launch(plan)
        assert executor.collect().graph == GraphUse(True, name)
    executor.shutdown()
    return torch.cat(found)


@pytest.mark.slow
def test_captured_steps_compute_with_narrow_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.choice.TRITON_TABLE", TRITON_TABLE)
    save_packed(tmp_path / "packed", tmp_path / "plain", "packed_4_zeros")
    same_text(captured_steps(tmp_path / "packed", ["decode 2"] * 2), cpu_logits(tmp_path / "plain")[10:])
