"""Owns the comparison of FP8 checkpoints that stay as stored with the same weights unpacked, for each kind of scales.
Never trusts the reader's own arithmetic: tests/support/packed_models.py writes every format number by number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.build.executor import check_executor, create_executor
from engine.build.host_fit import host_use
from engine.config import ConfigError, EngineConfig
from engine.models.config import read_model_config
from engine.models.fp8_rows import Fp8Rows
from engine.models.packing import Unpacked
from kernels.cpu.native.grouped import FP8
from tests.engine.models.test_integer_rows import check_kept, save, stays
from tests.engine.models.test_packed_weights import TOKENS, logits
from tests.kernels.rows import seeded_generator
from tests.support.compiler import needs_compiler
from tests.support.packed_models import float_quantized, fp8_blocks
from tests.support.plans import forced_logits

KEPT = {
    "by tensor": float_quantized("tensor"),
    "by output": float_quantized("channel"),
    "blocks of 128 x 128": fp8_blocks(128, 128),
    "blocks of 24 x 64": fp8_blocks(24, 64),
    "blocks of 64 x 96, which divide no matrix": fp8_blocks(64, 96),
}
APART = {"blocks of 32 x 20": fp8_blocks(32, 20), "blocks of 32 x 16": fp8_blocks(32, 16)}


def config(**settings: object) -> EngineConfig:
    return EngineConfig(num_kv_blocks=8, num_threads=1, **settings)  # type: ignore[arg-type]


def said_of_the_right_weights(saved: Path) -> str:
    """Check the logits against the same weights stored plainly, and return what the log says of them."""
    executor, resolved = create_executor(saved / "packed", config(dtype="float32", quantize="stored"))
    got = forced_logits(executor, TOKENS, range(8), 16)
    executor.shutdown()
    torch.testing.assert_close(got, logits(saved / "plain", "reference"), rtol=1e-4, atol=1e-4)
    return resolved.reasons["weights"]


@needs_compiler
@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_the_same_weights_stored_plainly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, KEPT[name], monkeypatch)
    check_kept(tmp_path)


@needs_compiler
@pytest.mark.parametrize("name", KEPT)
def test_in_bfloat16_log_probabilities_are_closer_to_the_weights_in_float32_than_converted_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of FP8 is exact in bfloat16, and its product with a scale is not."""
    save(tmp_path, KEPT[name], monkeypatch)
    exact = logits(tmp_path / "plain", "reference").log_softmax(-1)
    kept, converted = (
        (logits(tmp_path / "packed", "native", "bfloat16", quantize=how).log_softmax(-1) - exact).abs().mean()
        for how in ("stored", "none")
    )
    assert kept < converted


@needs_compiler
@pytest.mark.parametrize("name", APART)
def test_blocks_that_no_panel_has_are_unpacked_and_the_log_says_why(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, APART[name], monkeypatch)
    assert not any(stays(tmp_path / "packed"))
    reason = said_of_the_right_weights(tmp_path)
    assert f"computed in float32, because groups of {name[-2:]} inputs are no multiple of 32" in reason
    assert reason.endswith("; matrices: 13 in float32")


@needs_compiler
def test_a_matrix_whose_inputs_fill_no_blocks_is_unpacked_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLPs have 104 inputs, which no run of 32 divides, and all others have 96, which fill three of them."""
    save(tmp_path, fp8_blocks(128, 128), monkeypatch, hidden=96, inner=104)
    assert stays(tmp_path / "packed")[:4] == [True, True, True, False]
    reason = said_of_the_right_weights(tmp_path)
    assert "kept as stored, and widened in registers (AVX" in reason
    assert reason.endswith("; matrices: 10 as stored, 3 in float32")


@needs_compiler
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_other_families_keep_all_matrices(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, KEPT["blocks of 128 x 128"], monkeypatch, kind)
    check_kept(tmp_path)


@needs_compiler
def test_a_request_has_the_same_bits_in_any_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, KEPT["blocks of 128 x 128"], monkeypatch)
    found = []
    for count in (1, 3, 16, len(TOKENS)):
        executor, _ = create_executor(
            tmp_path / "packed", config(dtype="bfloat16", quantize="stored", kv_cache_dtype="fp8_e4m3")
        )
        found.append(forced_logits(executor, TOKENS, range(8), count))
        executor.shutdown()
    assert all(torch.equal(each, found[0]) for each in found)


@needs_compiler
def test_memory_is_counted_as_panels_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, KEPT["by output"], monkeypatch)
    directory = tmp_path / "packed"
    use = host_use(directory, read_model_config(directory), config(quantize="stored"), torch.bfloat16, native=True)
    executor, _ = create_executor(directory, config(dtype="bfloat16", quantize="stored"))
    weights = executor.model.decoder.weights  # type: ignore[attr-defined]
    packed = [each for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    taken = sum(part.nbytes for linear in packed for part in linear.weight.groups.data)
    executor.shutdown()
    assert taken == sum(linear.weight.outputs * linear.weight.inputs for linear in packed) * 132 // 128
    assert 0 <= use.weights - taken - 2 * 2 * weights.embedding.numel() <= 2**14


@needs_compiler
def test_rounded_activations_are_refused_for_fp8_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied as integers, which numbers of FP8 are not."""
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))
    save(tmp_path, KEPT["by output"], monkeypatch)
    with pytest.raises(ConfigError, match="activations are rounded only for weights of 4 to 8 bits that stay so"):
        check_executor(tmp_path / "packed", config(quantize="stored", activations="int8"))


@pytest.mark.parametrize("run", FP8)
def test_a_group_stands_for_the_numbers_of_its_format_to_the_bit(run: int) -> None:
    generator, groups = seeded_generator(), 256 // run
    values = torch.randint(0, 127, (37, 256), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn).float()
    scales = torch.randn(2, groups, generator=generator)
    unpacked = Unpacked(values, 0, scales, torch.arange(37) // 24, torch.arange(256) // run)
    rows = Fp8Rows.of(unpacked, FP8[run])
    order = torch.randperm(74, generator=generator)
    weight = torch.cat([unpacked.weight(), unpacked.weight()])
    assert torch.equal(rows.above(rows).take(order).weight(), weight[order])
