"""Owns the comparison of mixtures whose experts stay as a checkpoint stores them with the same weights unpacked.
Never trusts the reader's own arithmetic: tests/support/packed_models.py writes every format number by number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.build.executor import create_executor
from engine.build.host_fit import _expert_numbers, host_use
from engine.checkpoints.gguf_convert import convert_gguf
from engine.config import EngineConfig
from engine.models import native as native_model
from engine.models.config import read_model_config
from engine.models.description import Shard
from engine.models.gguf_rows import GgufRows
from engine.models.narrow import Keep
from engine.models.native import _packed
from engine.models.parameters import num_bytes
from engine.models.shards import sharded
from engine.models.stored_matrix import StoredExperts
from engine.models.weights import load_weights, weight_bytes
from tests.engine.models.test_integer_rows import held, save
from tests.engine.models.test_packed_shards import compare_parts, slow_but
from tests.engine.models.test_packed_weights import TOKENS, logits
from tests.engine.models.test_shards import BLOCKS, distance
from tests.engine.models.test_stored_matrix import converted
from tests.support import packed_models, tiny_gguf, tiny_models
from tests.support.compiler import needs_compiler
from tests.support.distances import is_within
from tests.support.packed_models import awq, float_quantized, fp8_blocks, gptq, int_quantized, pack_quantized
from tests.support.plans import forced_logits
from tests.support.rank_threads import Ranks, native

FORMATS = {
    "gptq, 4 bits": gptq(4, 32, ordered=False, zeros=True),
    "gptq, 8 bits": gptq(8, 64, ordered=False, zeros=True),
    "awq": awq(128),
    "integers in groups": int_quantized(32),
    "packed, 4 bits": pack_quantized(4, 64, zeros=True),
    "packed, 8 bits": pack_quantized(8, 128, zeros=True),
    "fp8 by output": float_quantized("channel"),
    "fp8 in blocks": fp8_blocks(128, 128),
    "packed, groups of 32": pack_quantized(4, 32, zeros=True),
}
SIZE = 96
"""Columns of an expert: whole groups of 32, and no whole group of 64, so that down projections have shorter runs."""
FAST = ("awq", "packed, 4 bits", "fp8 in blocks")
CASES = [
    *(pytest.param("qwen3_moe", name, marks=() if name in FAST else pytest.mark.slow) for name in FORMATS),
    ("mixtral", "packed, 4 bits"),
    pytest.param("mixtral", "fp8 in blocks", marks=pytest.mark.slow),
    pytest.param("qwen3_next", "packed, 4 bits", marks=pytest.mark.slow),
    ("qwen3_next", "fp8 in blocks"),
    ("qwen3_5_moe", "packed, 4 bits"),
    pytest.param("qwen3_5_moe", "fp8 in blocks", marks=pytest.mark.slow),
]
"""AWQ and GPTQ need a multiple of eight outputs of every matrix, routers included."""
PARTS = ("gate", "up", "down")


def apart(directory: Path) -> None:
    """Store all experts of a layer as matrices of their own, as packers do."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        prefix, _, part = name.rpartition(".")
        for number, matrix in enumerate(tensors.pop(name)):
            halves = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True) if part == "gate_up_proj" else ()
            own = dict(halves) or {"down_proj": matrix}
            tensors |= {f"{prefix}.{number}.{name}.weight": each.contiguous() for name, each in own.items()}
    save_file(tensors, path)


Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that saves a mixture once, packed and plain. Tests only read it."""
    made: dict[tuple[str, str, int], Path] = {}

    def save_plainly(kind: str, directory: Path) -> None:
        tiny_models.save_model(kind, directory)
        apart(directory)

    def make(kind: str, name: str, size: int = SIZE) -> Path:
        if (kind, name, size) in made:
            return made[kind, name, size]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_models, "save_model", save_plainly)
            for fields in (tiny_models.EXPERTS, tiny_models.SHARED):
                patch.setitem(fields, "moe_intermediate_size", size)
                patch.setitem(fields, "num_experts", 4)
            patch.setitem(tiny_models.SHARED, "shared_expert_intermediate_size", 64)
            patch.setitem(tiny_models.SHAPE, "num_hidden_layers", 2 if kind == "mixtral" else 3)
            inner = size if kind == "mixtral" else 128
            found = save(tmp_path_factory.mktemp(kind), FORMATS[name], patch, kind, 128, inner)
        return made.setdefault((kind, name, size), found)

    return make


def check_logits(directory: Path, plain: Path | None = None) -> None:
    """Compare those of a packed mixture with those of the same weights stored plainly. Where a token's experts have
    shares of any size, a router makes last bits large: a few tokens of 40 are 1e-4 apart with plain weights, too."""
    got, want = logits(directory, "native", quantize="stored"), logits(plain or directory, "reference")
    error = (got.log_softmax(-1) - want.log_softmax(-1)).abs()
    assert is_within(float(error.mean()), 1e-4)
    assert is_within(float(error.max()), 1e-2)


def mixtures(directory: Path, dtype: torch.dtype = torch.float32) -> list[StoredExperts]:
    """Return the experts' matrices, gate_up and down of each layer that has any."""
    config = read_model_config(directory)
    weights = load_weights(directory, config, dtype, keep=Keep.GROUPED)
    layers = [layer for layer in weights.layers if layer.router is not None]
    assert layers
    return [linear.weight for layer in layers for linear in (layer.gate_up, layer.down)]


@needs_compiler
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_log_probabilities_are_those_of_the_same_weights_stored_plainly(kind: str, name: str, saved: Saved) -> None:
    directory = saved(kind, name)
    assert all(isinstance(each, StoredExperts) for each in mixtures(directory / "packed"))
    check_logits(directory / "packed", directory / "plain")


@pytest.mark.parametrize("name", slow_but(FAST, FORMATS))
def test_the_matrices_of_every_expert_stand_for_what_the_format_defines_to_the_bit(name: str, saved: Saved) -> None:
    directory = saved("qwen3_moe", name)
    plain = load_weights(directory / "plain", read_model_config(directory / "plain"), torch.float32)
    wanted = [each for layer in plain.layers if layer.router is not None for each in (layer.gate_up, layer.down)]
    for experts, want in zip(mixtures(directory / "packed"), wanted, strict=True):
        assert experts.shape == tuple(want.weight.shape)
        assert torch.equal(
            torch.stack([rows.take(torch.arange(rows.shape[0])).weight() for rows in experts.take()]), want.weight
        )  # type: ignore[attr-defined]


@needs_compiler
def test_a_request_has_the_same_bits_in_any_chunks(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))  # which no product asks
    directory = saved("qwen3_moe", "packed, 4 bits")
    for settings in ({}, {"activations": "int8"}):
        found = []
        for count in (1, 3, 16, len(TOKENS)):
            config = EngineConfig(num_kv_blocks=8, num_threads=2, dtype="bfloat16", quantize="stored", **settings)  # type: ignore[arg-type]
            executor, _ = create_executor(directory / "packed", config)
            found.append(forced_logits(executor, TOKENS, range(8), count))
            executor.shutdown()
        assert all(torch.equal(each, found[0]) for each in found)


@needs_compiler
def test_activations_are_rounded_for_experts_in_integers_and_for_no_others(saved: Saved) -> None:
    for name, rounded in (("packed, 4 bits", True), ("fp8 in blocks", False)):
        directory = saved("qwen3_moe", name) / "packed"
        weights = load_weights(directory, read_model_config(directory), torch.float32, keep=Keep.GROUPED)
        packed = _packed(weights, quantize=False, rounded=True).layers[0]
        assert packed.gate_up.weight.rounded is packed.down.weight.rounded is rounded


@needs_compiler
def test_only_the_matrix_that_fills_no_blocks_is_unpacked(saved: Saved) -> None:
    """Experts of 40 columns: gate and up have 128 inputs each, and down has 40."""
    directory = saved("qwen3_moe", "packed, groups of 32", size=40)
    assert [isinstance(each, StoredExperts) for each in mixtures(directory / "packed")] == [True, False] * 2
    check_logits(directory / "packed", directory / "plain")


@needs_compiler
@pytest.mark.parametrize(("expert", "part"), [(0, "down"), pytest.param(3, "up", marks=pytest.mark.slow)])
def test_experts_of_which_one_is_stored_otherwise_are_all_unpacked_and_those_of_other_layers_stay(
    expert: int, part: str, saved: Saved, tmp_path: Path
) -> None:
    directory = shutil.copytree(saved("qwen3_moe", "packed, 4 bits"), tmp_path / "changed")
    name = f"model.layers.0.mlp.experts.{expert}.{part}_proj"
    path, plain = directory / "packed" / "model.safetensors", load_file(directory / "plain" / "model.safetensors")
    tensors = {key: tensor for key, tensor in load_file(path).items() if not key.startswith(f"{name}.")}
    save_file(tensors | {f"{name}.weight": plain[f"{name}.weight"]}, path)
    kept = [isinstance(each, StoredExperts) for each in mixtures(directory / "packed")]
    assert kept == [part != "up", part != "down", True, True]
    check_logits(directory / "packed", directory / "plain")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed, 4 bits", "fp8 in blocks"])
def test_experts_take_no_more_before_they_are_packed_than_their_panels(name: str, saved: Saved) -> None:
    for experts in mixtures(saved("qwen3_moe", name) / "packed"):
        for matrix in experts.matrices:
            assert 0 < sum(map(held, matrix.filled.values())) <= matrix.nbytes


@needs_compiler
def test_an_expert_is_let_go_once_it_is_packed(saved: Saved) -> None:
    experts, left = mixtures(saved("qwen3_moe", "packed, 4 bits") / "packed")[0], []
    for _ in experts.take():
        left.append(sum(bool(matrix.filled) for matrix in experts.matrices))
    assert left == [3, 2, 1, 0]


@needs_compiler
@pytest.mark.parametrize(("name", "count"), [("packed, 4 bits", 3), (None, 0)])
def test_what_a_layer_was_packed_from_is_given_back_before_the_next_one_takes_as_much(
    name: str | None, count: int, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one thread reads all experts and another frees them, so that the allocator kept all layers until the
    end, and a mixture took twice its size while it was loaded."""
    asked: list[None] = []
    monkeypatch.setattr(native_model, "give_back_freed_memory", lambda: asked.append(None))
    directory = saved("qwen3_moe", name or "packed, 4 bits") / ("packed" if name else "plain")
    stored = load_weights(directory, read_model_config(directory), torch.float32, keep=Keep.GROUPED)
    _packed(stored, quantize=False, rounded=False)
    assert len(asked) == count


@needs_compiler
@pytest.mark.parametrize("name", ["packed, 4 bits", "fp8 in blocks"])
def test_memory_is_counted_as_panels_take_it(name: str, saved: Saved) -> None:
    directory = saved("qwen3_moe", name) / "packed"
    model = read_model_config(directory)
    stored = load_weights(directory, model, torch.bfloat16, keep=Keep.GROUPED)
    counted = num_bytes(model, stored)
    assert counted == weight_bytes(directory, model, torch.bfloat16, keep=Keep.GROUPED)
    config = EngineConfig(device="cpu", dtype="bfloat16", quantize="stored", num_kv_blocks=8)
    assert host_use(directory, model, config, torch.bfloat16, native=True).weights == counted
    said = sum(
        linear.weight.nbytes
        for layer in stored.layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    packed = _packed(stored, quantize=False, rounded=False)
    taken = [
        linear.weight.groups
        for layer in packed.layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    assert said == sum(part.nbytes for groups in taken for part in groups.data)


@pytest.mark.parametrize(("ranks", "rows"), [(1, 2), (2, 8)])
def test_a_steps_memory_has_the_rows_of_experts_on_all_ways_and_those_rounded_to_8_bits(
    ranks: int, rows: int, saved: Saved
) -> None:
    """Sorted by expert and as they come out; with others, as sent, as they come from each, and back. A row of 32
    numbers rounded takes 48 bytes."""
    model = read_model_config(saved("qwen3_moe", "packed, 4 bits") / "packed")
    (one, *_) = (layer.experts for layer in model.layers if layer.experts is not None)
    plain = one.routing.per_token * (rows * model.hidden_size + ranks * one.intermediate_size)
    assert _expert_numbers(model, ranks, rounded=False) == plain
    more = 4 * (_expert_numbers(model, ranks, rounded=True) - plain)
    assert more == one.routing.per_token * ranks * (model.hidden_size + one.intermediate_size) // 32 * 48


def test_the_log_counts_experts_as_stored(saved: Saved) -> None:
    directory = saved("qwen3_moe", "packed, 4 bits") / "packed"
    executor, resolved = create_executor(
        directory, EngineConfig(num_kv_blocks=8, num_threads=1, dtype="float32", quantize="stored")
    )
    executor.shutdown()
    assert resolved.reasons["weights"].endswith("; matrices: 12 as stored, 1 in float32")
    assert "experts" not in resolved.reasons["weights"]


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed, 4 bits", pytest.param("fp8 in blocks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_columns_of_experts_stay_as_stored_on_each_rank(kind: str, name: str, saved: Saved) -> None:
    directory = saved(kind, name, size=256)
    for own in compare_parts(directory / "packed", directory / "plain", 2, Keep.GROUPED):
        assert own["0 gate_up"]
        assert own["0 down"]


@needs_compiler
def test_ranks_with_columns_of_experts_answer_as_the_whole_model(saved: Saved) -> None:
    directory = saved("qwen3_moe", "packed, 4 bits", size=256)
    plain = Ranks(directory / "plain", 1).prompt(TOKENS, BLOCKS)
    ranks = Ranks(directory / "packed", 2, make=native, keep=Keep.GROUPED)
    assert is_within(distance(ranks.prompt(TOKENS, BLOCKS), plain), 1e-4)


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"hidden": 256, "inner": 512, "head_dim": 64, "expert": 256}.items():
        monkeypatch.setitem(tiny_gguf.SHAPE, name, size)


def by_gguf(file: Path, name: str) -> Tensor:
    """Return what the gguf package makes of all experts of a layer. # [experts, outputs, inputs]"""
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == f"{name}.weight")
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.mark.usefixtures("gguf_shape")
@pytest.mark.parametrize("arch", tiny_gguf.MIXTURES)
def test_experts_of_a_gguf_file_are_its_blocks_where_they_were_read(arch: str, tmp_path: Path) -> None:
    """Until they are packed, they take no memory that the system could not drop."""
    directory = converted(tmp_path, arch)
    file = str(directory / "model.safetensors")
    weights = load_weights(directory, read_model_config(directory), torch.float32, keep=Keep.GROUPED)
    pages = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
    for number, layer in enumerate(weights.layers):
        gate, up, down = (by_gguf(tmp_path / "tiny.gguf", f"blk.{number}.ffn_{part}_exps") for part in PARTS)
        for linear, want in ((layer.gate_up, torch.cat((gate, up), 1)), (layer.down, down)):
            assert isinstance(linear.weight, StoredExperts)
            for rows, matrix in zip(linear.weight.take(), want, strict=True):
                assert isinstance(rows, GgufRows)
                assert torch.equal(rows.take(torch.arange(len(matrix))).weight(), matrix)
                for blocks in (rows.blocks, *rows.below):
                    first, last = blocks.data_ptr(), blocks[-1:, -1:].data_ptr()
                    assert any(int(start, 16) <= first and last < int(end, 16) for start, end in pages)


@pytest.mark.usefixtures("gguf_shape")
def test_a_prepared_mixture_names_the_types_of_all_experts_of_a_layer_at_once(tmp_path: Path) -> None:
    config = json.loads((converted(tmp_path, "qwen3moe") / "config.json").read_text())
    types = config["quantization_config"]["types"]
    assert types["model.layers.0.mlp.experts.*.gate_proj"] == "Q4_K"
    assert types["model.layers.1.mlp.experts.*.down_proj"] == "Q4_0"
    assert not [name for name in types if ".experts.0." in name]


@needs_compiler
@pytest.mark.usefixtures("gguf_shape")
def test_experts_whose_gate_and_up_differ_in_type_are_unpacked(tmp_path: Path) -> None:
    directory = converted(tmp_path, "qwen3moe", blk__1__ffn_gate_exps="Q5_0")
    assert [isinstance(each, StoredExperts) for each in mixtures(directory)] == [True, True, False, True]
    check_logits(directory)


@needs_compiler
@pytest.mark.usefixtures("gguf_shape")
def test_a_mixture_in_blocks_serves_settings_that_want_a_file_in_bfloat16(tmp_path: Path) -> None:
    directory, plain = converted(tmp_path, "mixtral"), tmp_path / "plain"
    plain.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", plain, progress=False)
    got, want = (logits(each, "native", "bfloat16", quantize="none") for each in (directory, plain))
    assert torch.equal(got, want)


@needs_compiler
@pytest.mark.usefixtures("gguf_shape")
def test_ranks_cut_the_experts_of_a_gguf_file_between_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_gguf.SHAPE, "expert", 512)
    directory = converted(tmp_path, "qwen3moe")
    plain = Ranks(directory, 1).prompt(TOKENS, BLOCKS)
    for part in (sharded(read_model_config(directory), Shard(rank, 2)) for rank in range(2)):
        layers = load_weights(directory, part, torch.float32, keep=Keep.GROUPED).layers
        assert all(isinstance(each.weight, StoredExperts) for layer in layers for each in (layer.gate_up, layer.down))
    ranks = Ranks(directory, 2, make=native, keep=Keep.GROUPED)
    assert is_within(distance(ranks.prompt(TOKENS, BLOCKS), plain), 1e-4)
