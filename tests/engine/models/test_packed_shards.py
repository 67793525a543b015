"""Owns the parts of packed matrices: what a rank unpacks or keeps is its part of the same weights stored plainly.
Never trusts the reader's own arithmetic: tests/support/packed_models.py writes every format number by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.config import read_model_config
from engine.models.gguf_rows import BLOCK_BYTES, GgufRows
from engine.models.narrow import Keep
from engine.models.native import _packed
from engine.models.parameters import DecoderWeights, num_bytes
from engine.models.shards import head_rows
from engine.models.stored_matrix import StoredExperts, StoredMatrix
from engine.models.weights import load_weights, weight_bytes
from kernels import reference
from kernels.cpu.native.grouped import panels_of
from kernels.forward import Linear
from tests.engine.models.test_gguf_rows import random_rows
from tests.engine.models.test_integer_rows import APART, KEPT, save
from tests.engine.models.test_shards import BLOCKS, TOKENS, distance, parts, values
from tests.engine.models.test_stored_matrix import converted
from tests.support import packed_models, tiny_gguf, tiny_models
from tests.support.compiler import needs_compiler
from tests.support.distances import is_within
from tests.support.packed_models import FORMATS, fp8_blocks, gptq, pack_quantized, save_packed
from tests.support.rank_threads import Ranks, native


def slow_but(fast: Sequence[str], names: Iterable[str]) -> list[Any]:
    """Return the parameters of a test, of which only some run with the fast tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def plainly(linear: Linear) -> Tensor:
    """Return a matrix's weights, or those of all experts. Empties a matrix in blocks."""
    if isinstance(linear.weight, StoredExperts):
        return torch.stack([plainly(Linear(matrix)) for matrix in linear.weight.matrices])
    if isinstance(linear.weight, StoredMatrix):
        found = [rows.take(torch.arange(rows.shape[0])).weight() for rows in linear.weight.take_parts()]  # type: ignore[attr-defined]
        return torch.cat(found)
    if linear.weight.dim() == 2:
        return reference.dequantize(linear).float()
    return torch.stack([reference.dequantize(linear.of_expert(n)).float() for n in range(len(linear.weight))])


def matrices(weights: DecoderWeights) -> dict[str, Linear]:
    found = {"lm_head": weights.lm_head}
    for number, layer in enumerate(weights.layers):
        own = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
        found |= {f"{number} {name}": linear for name, linear in own.items()}
    return found


def stay(weights: DecoderWeights) -> dict[str, bool]:
    """Return which matrices have fewer bits than activations."""
    return {
        name: linear.scales is not None or isinstance(linear.weight, StoredMatrix | StoredExperts)
        for name, linear in matrices(weights).items()
    }


def compare_parts(packed: Path, plain: Path, size: int, keep: Keep) -> list[dict[str, bool]]:
    """Compare each rank's matrices, to the bit, with those of the same weights stored plainly. Return which stay
    packed. plain: a checkpoint without packed tensors, cut like the packed one."""
    found = []
    for part in parts(packed, size):
        got, want = load_weights(packed, part, torch.float32, keep=keep), load_weights(plain, part, torch.float32)
        found.append(stay(got))
        for name, linear in matrices(got).items():
            assert torch.equal(plainly(linear), plainly(matrices(want)[name])), (part.shard, name)
    return found


# --- packed by number -------------------------------------------------------------------------------------------------


FIRST = ("gptq_4_ordered", "fp8_blocks")
"""Formats that differ most in how they are cut; the others are tested by `make test-slow`."""


@pytest.mark.parametrize("name", slow_but(FIRST, FORMATS))
def test_a_rank_has_its_part_of_what_each_format_defines(name: str, tmp_path: Path) -> None:
    """Three and four ranks end within integers and blocks, and unpack what is around their parts."""
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    for size in (2, 3, 4):
        compare_parts(tmp_path / "packed", tmp_path / "plain", size, Keep.NOTHING)
        kept = compare_parts(tmp_path / "packed", tmp_path / "plain", size, Keep.NARROW)
        every = name != "fp8_blocks"
        for own in kept if size == 2 else ():
            assert own["0 qkv"] is own["0 gate_up"] is every
            assert own["0 output"] is own["0 down"] is (every and not name.endswith("ordered"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("int_by_output", kind) for kind in ("phi3", "qwen3_next")),
        pytest.param("int_by_output", "qwen3_moe", marks=pytest.mark.slow),
        pytest.param("packed_4_zeros", "qwen3_5", marks=pytest.mark.slow),
        *(pytest.param("fp8_blocks_16", kind, marks=pytest.mark.slow) for kind in ("phi3", "qwen3_moe", "qwen3_next")),
        *(pytest.param("packed_4_zeros", kind, marks=pytest.mark.slow) for kind in ("phi3", "qwen3_moe", "qwen3_next")),
    ],
)
def test_stacked_matrices_and_experts_are_cut_by_their_parts(name: str, kind: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name, kind)
    for keep in (Keep.NOTHING, Keep.BY_OUTPUT, Keep.NARROW):
        compare_parts(tmp_path / "packed", tmp_path / "plain", 2 if kind != "phi3" else 3, keep)


GROUPED = {**KEPT, **APART, "fp8": fp8_blocks(32, 32)}


@pytest.mark.parametrize("name", slow_but(("packed, 4 bits with zero points", "fp8"), GROUPED))
def test_groups_stay_as_stored_where_ranks_have_whole_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, GROUPED[name], monkeypatch)
    kept = compare_parts(tmp_path / "packed", tmp_path / "plain", 2, Keep.GROUPED)
    assert kept[0] == kept[1]
    assert kept[0]["0 down"] is (name not in APART)


def test_a_group_that_two_ranks_have_halves_of_stays_in_shorter_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's heads begin at input 64 of a group of 128."""
    save(tmp_path, gptq(4, 128, ordered=False, zeros=True), monkeypatch)
    for own in compare_parts(tmp_path / "packed", tmp_path / "plain", 2, Keep.GROUPED):
        assert own["0 output"]
    for own, whole in zip(
        compare_parts(tmp_path / "packed", tmp_path / "plain", 2, Keep.NARROW), (True, False), strict=True
    ):
        assert own["0 output"] is whole, "a GPU's kernels count groups from the first input"


def test_runs_are_as_short_as_a_parts_first_input_needs_and_not_only_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three ranks has 128 inputs, as many as a group, and they begin in the middle of one."""
    shape = {"hidden_size": 224, "num_attention_heads": 28, "num_key_value_heads": 7, "num_hidden_layers": 1}
    for name, size in shape.items():
        monkeypatch.setitem(tiny_models.SHAPE, name, size)
    monkeypatch.setitem(packed_models.FORMATS, "this", pack_quantized(4, 128, zeros=True))
    save_packed(tmp_path / "packed", tmp_path / "plain", "this")
    assert [part.num_heads * part.head_dim for part in parts(tmp_path / "packed", 3)] == [192, 128, 128]
    for own in compare_parts(tmp_path / "packed", tmp_path / "plain", 3, Keep.GROUPED):
        assert own["0 output"]


@pytest.mark.parametrize("name", slow_but(["fp8_blocks"], FORMATS))
def test_ranks_together_answer_as_the_whole_packed_model(name: str, tmp_path: Path) -> None:
    save_packed(tmp_path / "packed", tmp_path / "plain", name)
    want = Ranks(tmp_path / "packed", 1).prompt(TOKENS, BLOCKS)
    assert is_within(distance(Ranks(tmp_path / "packed", 2).prompt(TOKENS, BLOCKS), want), 1e-4)


# --- blocks of GGUF's formats -----------------------------------------------------------------------------------------


@pytest.fixture
def gguf_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model, but smaller: 9 heads with 3 KV heads, and rows that nested blocks do not divide, but for those
    of the MLP's down projection."""
    for name, size in {"hidden": 288, "inner": 512, "heads": 9, "kv_heads": 3, "head_dim": 32}.items():
        monkeypatch.setitem(tiny_gguf.SHAPE, name, size)


NESTED = {
    "token_embd": "Q8_0",
    **{f"blk__{layer}__attn_{part}": "Q5_0" for layer in range(2) for part in ("q", "k", "v", "output")},
    **{f"blk__{layer}__ffn_{part}": "Q5_0" for layer in range(2) for part in ("gate", "up")},
    "blk__0__attn_v": "Q8_0",
    "blk__0__ffn_down": "Q6_K",
    "blk__1__ffn_down": "Q4_K",
}


@pytest.mark.usefixtures("gguf_shape")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_blocks_stay_as_stored_and_are_cut_between_blocks(tied: bool, tmp_path: Path) -> None:
    directory = converted(tmp_path, tied=tied, **NESTED)
    whole = matrices(load_weights(directory, read_model_config(directory), torch.float32))
    ranks = []
    for part in parts(directory, 2):
        assert part.intermediate_size == 256
        plain = matrices(load_weights(directory, part, torch.float32))
        stored = load_weights(directory, part, torch.float32, keep=Keep.GROUPED)
        assert num_bytes(part, stored) == weight_bytes(directory, part, torch.float32, keep=Keep.GROUPED)
        assert set(stay(stored).values()) == {True}
        for name, linear in matrices(stored).items():
            assert torch.equal(plainly(linear), plain[name].weight), (part.shard, name)
        ranks.append(plain)
    for name, linear in whole.items():
        found = [own[name].weight for own in ranks]
        if name.endswith(("output", "down", "head")):
            assert torch.equal(torch.cat(found, 0 if name == "lm_head" else 1), linear.weight), name
        else:  # each rank has some of each part
            assert torch.equal(values(found), values([linear.weight])), name


@pytest.mark.usefixtures("gguf_shape")
def test_ranks_together_answer_as_the_whole_model_of_a_gguf_file(tmp_path: Path) -> None:
    directory = converted(tmp_path, **NESTED)
    want = Ranks(directory, 1).prompt(TOKENS, BLOCKS)
    assert is_within(distance(Ranks(directory, 2).prompt(TOKENS, BLOCKS), want), 1e-4)


@pytest.mark.usefixtures("gguf_shape")
def test_an_output_projection_whose_blocks_two_ranks_share_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 12 heads of 64, three ranks have a block of 256 inputs each, and six have half of one."""
    for name, size in {"heads": 12, "kv_heads": 6, "head_dim": 64}.items():
        monkeypatch.setitem(tiny_gguf.SHAPE, name, size)
    directory = converted(tmp_path, **NESTED | {"blk__0__attn_output": "Q6_K"})
    whole = load_weights(directory, read_model_config(directory), torch.float32).layers[0].output.weight
    for size, in_blocks in ((3, True), (6, False)):
        found = [load_weights(directory, part, torch.float32, keep=Keep.GROUPED) for part in parts(directory, size)]
        assert [stay(own)["0 output"] for own in found] == [in_blocks] * size
        assert torch.equal(torch.cat([plainly(own.layers[0].output) for own in found], 1), whole)


@pytest.mark.usefixtures("gguf_shape")
def test_blocks_of_a_part_are_read_from_the_files_pages_without_a_copy(tmp_path: Path) -> None:
    """Until they are packed, weights take no memory that the system could not drop, also where columns are cut."""
    directory = converted(tmp_path, **NESTED)
    weights = load_weights(directory, parts(directory, 2)[1], torch.float32, keep=Keep.GROUPED)
    file = str(directory / "model.safetensors")
    pages = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
    for linear in (weights.layers[0].down, weights.layers[1].gate_up, weights.lm_head):
        assert isinstance(linear.weight, StoredMatrix)
        for rows in linear.weight.take_parts():
            assert isinstance(rows, GgufRows)
            for blocks in (rows.blocks, *rows.below):
                first, last = blocks.data_ptr(), blocks[-1:, -1:].data_ptr()
                assert any(int(start, 16) <= first and last < int(end, 16) for start, end in pages)


@needs_compiler
@pytest.mark.usefixtures("gguf_shape")
def test_columns_of_blocks_are_packed_like_a_matrix_of_their_own(tmp_path: Path) -> None:
    rows = random_rows("Q6_K", 70, 768)
    part = GgufRows("Q6_K", rows.blocks[:, BLOCK_BYTES["Q6_K"] : 3 * BLOCK_BYTES["Q6_K"]])
    alone = GgufRows("Q6_K", part.blocks.contiguous())
    for got, want in zip(panels_of([part]).data, panels_of([alone]).data, strict=True):
        assert torch.equal(got, want)


# --- the native kernels -----------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.usefixtures("gguf_shape")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_native_ranks_compute_a_gguf_files_blocks_as_the_whole_model_does(tied: bool, tmp_path: Path) -> None:
    directory = converted(tmp_path, tied=tied, **NESTED)
    plain = Ranks(directory, 1).prompt(TOKENS, BLOCKS)
    whole, ranks = (Ranks(directory, size, make=native, keep=Keep.GROUPED) for size in (1, 2))
    want = whole.prompt(TOKENS, BLOCKS)
    assert is_within(distance(want, plain), 1e-4)
    assert is_within(distance(ranks.prompt(TOKENS, BLOCKS), want), 1e-4)
    assert ranks.greedy(TOKENS[:20], BLOCKS, 6) == whole.greedy(TOKENS[:20], BLOCKS, 6)


@needs_compiler
@pytest.mark.parametrize("kind", ["plain", "gguf"])
@pytest.mark.usefixtures("gguf_shape")
def test_packing_a_ranks_tied_head_leaves_the_embedding_readable(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library packs whole panels in place: a head that shares the embedding's memory must be copied."""
    monkeypatch.setitem(tiny_gguf.SHAPE, "vocab", 256)
    directory = converted(tmp_path, **NESTED if kind == "gguf" else dict.fromkeys(NESTED, None))
    for part in parts(directory, 2):
        weights = load_weights(directory, part, torch.float32, keep=Keep.GROUPED)
        before = load_weights(directory, part, torch.float32).embedding.clone()
        packed = _packed(weights, quantize=False, rounded=False)
        assert packed.lm_head.weight.outputs == len(head_rows(part))
        if kind == "plain":
            assert torch.equal(packed.embedding, before)
        else:
            assert packed.embedding is not packed.lm_head.weight
            assert packed.embedding.outputs == part.vocab_size
