"""Owns the comparison of models in a GGUF file's own bits with the same weights unpacked, from the file to the logits.
Never needs a real file: every matrix is random blocks, of all formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.build.executor import check_executor, create_executor
from engine.build.host_fit import host_use
from engine.build.model import ModelBuilder
from engine.checkpoints.gguf_convert import convert_gguf
from engine.checkpoints.prepare import prepare_model
from engine.config import ConfigError, EngineConfig
from engine.host.cores import usable_threads
from engine.models.config import CheckpointError, read_model_config
from engine.models.gguf_rows import GgufRows
from engine.models.narrow import Keep
from engine.models.native import NativeModel
from engine.models.stored_matrix import StoredMatrix
from engine.models.weights import load_weights
from kernels.cpu.native.grouped import FORMS
from tests.engine.models.test_gguf_rows import by_gguf, random_rows
from tests.support import tiny_gguf
from tests.support.compiler import needs_compiler
from tests.support.memory_maps import mapping_flags, needs_huge_pages
from tests.support.plans import forced_logits
from tests.support.tiny_gguf import gguf_tensors, hf_weights, write_gguf

TOKENS = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = {
    "token_embd": "Q6_K",
    "output": "Q8_0",
    "blk.0.attn_q": "Q4_K",
    "blk.0.attn_k": "Q6_K",
    "blk.0.attn_v": "Q5_K",
    "blk.0.attn_output": "Q4_0",
    "blk.0.ffn_gate": "Q4_K",
    "blk.0.ffn_up": "Q4_K",
    "blk.0.ffn_down": "Q6_K",
    "blk.1.attn_q": "Q4_1",
    "blk.1.attn_k": "Q4_1",
    "blk.1.attn_v": "Q8_0",
    "blk.1.attn_output": "Q5_0",
    "blk.1.ffn_gate": "Q5_1",
    "blk.1.ffn_up": "Q5_1",
    "blk.1.ffn_down": "Q8_0",
    "blk.0.ffn_gate_exps": "Q4_K",
    "blk.0.ffn_up_exps": "Q4_K",
    "blk.0.ffn_down_exps": "Q6_K",
    "blk.1.ffn_gate_exps": "Q5_1",
    "blk.1.ffn_up_exps": "Q5_1",
    "blk.1.ffn_down_exps": "Q4_0",
}
"""All formats, and matrices that are stacked of several."""


@pytest.fixture(autouse=True)
def shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 256 inputs, as nested scales need them, and heads that the native kernels take."""
    for name, size in {"hidden": 256, "inner": 512, "head_dim": 64, "expert": 256}.items():
        monkeypatch.setitem(tiny_gguf.SHAPE, name, size)


def converted(path: Path, arch: str = "llama", *, tied: bool = True, **kinds: str | None) -> Path:
    """Write a file of random blocks and convert it. kinds: changes of KINDS, with `__` for `.`; None: plain numbers."""
    weights = hf_weights(arch, tied=tied)
    for name in weights:
        if not name.endswith("norm.weight"):
            weights[name] *= np.float32(0.1)
    tensors = gguf_tensors(arch, weights)
    chosen = KINDS | {name.replace("__", "."): kind for name, kind in kinds.items()}
    blocks = {}
    for name, kind in chosen.items():
        if kind is not None and f"{name}.weight" in tensors:
            size = 0.1 / (1 << FORMS[kind].bits) / (64 if FORMS[kind].nested else 1)
            *outer, inputs = tensors[f"{name}.weight"].shape
            rows = random_rows(kind, math.prod(outer), inputs, size=size).blocks.view(*outer, -1)
            blocks[f"{name}.weight"] = (rows.numpy(), gguf.GGMLQuantizationType[kind])
    file = write_gguf(path / "tiny.gguf", arch, tensors, blocks=blocks)
    directory = path / "stored"
    directory.mkdir()
    convert_gguf(file, directory, progress=False, stored=True)
    return directory


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "dtype": "float32", "num_kv_blocks": 8, "num_threads": 1} | settings)


def logits(directory: Path, **settings: Any) -> Tensor:
    executor, _ = create_executor(directory, config(**settings))
    try:
        return forced_logits(executor, TOKENS, range(8), 16)
    finally:
        executor.shutdown()


@needs_compiler
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", *tiny_gguf.MIXTURES])
def test_logits_are_those_of_the_same_weights_unpacked(arch: str, tied: bool, tmp_path: Path) -> None:
    directory = converted(tmp_path, arch, tied=tied)
    got, want = logits(directory, quantize="stored"), logits(directory, kernels="reference")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_blocks_serve_settings_that_want_a_file_in_bfloat16(quantize: str, tmp_path: Path) -> None:
    """In that type weights are the same to the bit, since each form rounds the file's numbers once."""
    directory, plain = converted(tmp_path), tmp_path / "plain"
    plain.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", plain, progress=False)
    got, want = (logits(each, quantize=quantize, dtype="bfloat16") for each in (directory, plain))
    assert torch.equal(got, want)


@needs_compiler
@pytest.mark.parametrize(
    "kinds",
    [{"blk__1__ffn_gate": "Q4_0"}, {"blk__0__attn_k": None}, {"token_embd": None}, {"output": None}],
    ids=["gates apart", "a part in plain numbers", "a plain embedding", "a plain head"],
)
def test_a_matrix_that_cannot_stay_in_blocks_is_unpacked_and_all_others_stay(
    kinds: dict[str, str | None], tmp_path: Path
) -> None:
    directory = converted(tmp_path, tied=False, **kinds)
    weights = load_weights(directory, read_model_config(directory), torch.float32, keep=Keep.GROUPED)
    matrices = [weights.embedding, weights.lm_head.weight]
    for layer in weights.layers:
        matrices += [linear.weight for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert sum(isinstance(matrix, StoredMatrix) for matrix in matrices) == len(matrices) - 1
    got, want = logits(directory, quantize="stored"), logits(directory, kernels="reference")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_a_tied_embedding_and_head_are_the_same_memory_and_what_is_packed_is_let_go(tmp_path: Path) -> None:
    executor, _ = create_executor(converted(tmp_path), config(quantize="stored"))
    model = executor.model  # type: ignore[attr-defined]
    assert isinstance(model, NativeModel)
    weights = model.decoder.weights
    assert weights.embedding is weights.lm_head.weight
    executor.shutdown()


def panels(directory: Path, **settings: Any) -> list[Tensor]:
    """Return the panels of all matrices, the LM head's first."""
    executor, _ = create_executor(directory, config(quantize="stored", **settings))
    weights = executor.model.decoder.weights  # type: ignore[attr-defined]
    packed = [
        weights.lm_head,
        *(each for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)),
    ]
    executor.shutdown()
    return [part for linear in packed for part in linear.weight.groups.data]


@needs_compiler
@needs_huge_pages
@pytest.mark.parametrize("quantize", ["none", "int8", "stored"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_all_matrices_lie_on_large_pages(quantize: str, tied: bool, tmp_path: Path) -> None:
    executor, _ = create_executor(converted(tmp_path, tied=tied), config(quantize=quantize))
    weights = executor.model.decoder.weights  # type: ignore[attr-defined]
    executor.shutdown()
    linears = [weights.lm_head]
    linears += [each for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    for packed in (linear.weight for linear in linears):
        for part in (packed.panels,) if packed.groups is None else packed.groups.data:
            assert "hg" in (mapping_flags(part.data_ptr()) or [])


@needs_compiler
def test_panels_are_the_same_whatever_the_number_of_threads_that_pack(tmp_path: Path) -> None:
    directory = converted(tmp_path, tied=False)
    alone, together = (panels(directory, num_threads=count) for count in (1, usable_threads()[0]))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.fixture
def threads_of_torch() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@needs_compiler
def test_threads_that_pack_share_the_memory_of_one_slice_and_start_no_threads_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_of_torch: int
) -> None:
    """Regression guard: each had a slice of its own as large as all have now, and a team of torch's threads."""
    found: dict[int, list[int]] = {1: [], 4: []}
    torch_threads = set()

    def pack(rows: GgufRows, index: Tensor, panels: Tensor, counts: list[int]) -> None:
        counts.append(len(index))
        torch_threads.add(torch.get_num_threads())
        whole(rows, index, panels)

    whole, directory = GgufRows.pack, converted(tmp_path)
    monkeypatch.setattr("kernels.cpu.native.grouped._SLICE", 128 * 512)
    for num_threads, counts in found.items():
        monkeypatch.setattr(GgufRows, "pack", partialmethod(pack, counts=counts))
        load = ModelBuilder(
            model_dir=directory,
            model=read_model_config(directory),
            config=config(quantize="stored"),
            resolved=check_executor(directory, config(quantize="stored")),
            runner=lambda decoder, cache, _, num_threads=num_threads: NativeModel(
                decoder, cache, block_size=16, num_threads=num_threads, num_tokens=16, num_sampled=4
            ),
            keep=Keep.GROUPED,
        )
        load.build()
        assert torch.get_num_threads() == threads_of_torch
    assert torch_threads == {1}
    assert sum(found[4]) == sum(found[1])
    assert max(found[1]) == 256
    assert max(found[4]) == 64


@needs_compiler
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_memory_is_counted_as_panels_take_it(arch: str, tmp_path: Path) -> None:
    directory = converted(tmp_path, arch)
    model = read_model_config(directory)
    plain, stored = (
        host_use(directory, model, config(quantize=how), torch.bfloat16, native=True) for how in ("none", "stored")
    )
    taken = sum(part.nbytes for part in panels(directory, dtype="bfloat16"))
    assert taken <= stored.weights <= 1.1 * taken + 2**15
    assert stored.weights < 0.5 * plain.weights


@needs_compiler
def test_the_log_says_which_formats_stay_and_by_what_they_are_multiplied(tmp_path: Path) -> None:
    directory = converted(tmp_path)
    reason = check_executor(directory, config(quantize="stored")).reasons["weights"]
    assert "gguf Q6_K" in reason
    assert "kept as stored, and widened in registers (AVX" in reason
    assert "computed in float32" in check_executor(directory, config(quantize="none")).reasons["weights"]


@pytest.mark.parametrize("kernels", ["torch_cpu", "reference"])
def test_other_kernels_than_the_native_ones_are_refused(kernels: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="only the native kernels compute with weights in a checkpoint's own 4 to 8 bits"
    ):
        check_executor(converted(tmp_path), config(quantize="stored", kernels=kernels))


def test_rows_of_another_length_are_refused_by_name(tmp_path: Path) -> None:
    directory = converted(tmp_path)
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.replace('"Q5_0"', '"Q4_0"'))
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.o_proj.weight has shape .*, but gguf Q4_0 has"):
        load_weights(directory, read_model_config(directory), torch.float32)


def test_a_file_has_a_directory_for_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    file = str(write_gguf(tmp_path / "tiny.gguf"))
    plain, stored = (prepare_model(file, progress=False, stored=stored) for stored in (False, True))
    assert plain != stored
    assert prepare_model(file, progress=False) == plain


def test_parts_are_filled_by_themselves_and_neighbours_of_one_format_joined() -> None:
    matrix = StoredMatrix(70, 256, FORMS["Q6_K"], torch.float32, torch.device("cpu"))
    parts = [random_rows(kind, outputs, 256) for kind, outputs in (("Q4_0", 32), ("Q4_0", 33), ("Q6_K", 5))]
    for view, rows in reversed(list(zip(matrix.split([32, 33, 5]), parts, strict=True))):
        view.fill(rows)
    first, second = matrix.take_parts()
    assert (first.form, second.form) == (FORMS["Q4_0"], FORMS["Q6_K"])
    assert isinstance(first, GgufRows)
    assert torch.equal(first.take(torch.arange(65)).weight(), torch.cat([by_gguf(part) for part in parts[:2]]))
    assert [each.data_ptr() for each in (first.blocks, *first.below)] == [part.blocks.data_ptr() for part in parts[:2]]
    assert not matrix.filled
    assert matrix.nbytes == FORMS["Q6_K"].nbytes(70, 256)


def test_a_matrix_that_was_not_filled_whole_is_a_bug() -> None:
    matrix = StoredMatrix(64, 256, FORMS["Q4_0"], torch.float32, torch.device("cpu"))
    matrix.split([32, 32])[1].fill(GgufRows("Q4_0", random_rows("Q4_0", 32, 256).blocks))
    with pytest.raises(AssertionError):
        matrix.take_parts()


def test_blocks_are_read_from_the_files_pages_without_a_copy(tmp_path: Path) -> None:
    """Until they are packed, weights take no memory that the system could not drop."""
    directory = converted(tmp_path)
    weights = load_weights(directory, read_model_config(directory), torch.float32, keep=Keep.GROUPED)
    file = str(directory / "model.safetensors")
    pages = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
    for linear in (weights.layers[0].down, weights.layers[1].gate_up):
        assert isinstance(linear.weight, StoredMatrix)
        (rows,) = linear.weight.take_parts()
        assert isinstance(rows, GgufRows)
        for blocks in (rows.blocks, *rows.below):
            first, last = blocks.data_ptr(), blocks.data_ptr() + blocks.nbytes - 1
            assert any(int(start, 16) <= first and last < int(end, 16) for start, end in pages)
