"""The comparison of steps with llama.cpp's own benchmark: the files it makes, and what it reports."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.engine import shapes
from benchmarks.engine.shapes import FORMATS, OURS, PROMPT, Shape, compare, random_blocks, table, write_random
from tests.support.tiny_gguf import TOKENS, write_gguf

SMALL = Shape(hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, inner=512)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_blocks_are_finite_weights_that_differ(kind: str) -> None:
    blocks = random_blocks(6, 512, kind, np.random.default_rng(1))
    weights = gguf.quants.dequantize(blocks, FORMATS[kind])
    assert weights.shape == (6, 512)
    assert np.isfinite(weights).all()
    assert len(np.unique(weights[0])) > 8
    assert 0 < np.abs(weights).max() < 8


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_has_the_shape_the_format_and_a_tokenizer(kind: str, tmp_path: Path) -> None:
    default = write_gguf(tmp_path / "default.gguf")
    write_random(tmp_path / "made.gguf", SMALL, kind, default, np.random.default_rng(1))
    read = gguf.GGUFReader(tmp_path / "made.gguf")
    assert read.fields["tokenizer.ggml.tokens"].contents() == TOKENS
    kinds = {tensor.name: tensor.tensor_type for tensor in read.tensors}
    assert kinds["token_embd.weight"] == kinds["blk.1.ffn_down.weight"] == FORMATS[kind]
    assert tuple(next(t for t in read.tensors if t.name == "blk.0.attn_k.weight").shape) == (256, 128)


def test_a_file_may_have_experts_beside_a_router_that_is_not_in_blocks(tmp_path: Path) -> None:
    default, shape = write_gguf(tmp_path / "default.gguf"), replace(SMALL, experts=3, per_token=2)
    write_random(tmp_path / "made.gguf", shape, "q4_k", default, np.random.default_rng(1))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
    assert tuple(tensors["blk.1.ffn_down_exps.weight"].shape) == (512, 256, 3)
    assert tensors["blk.1.ffn_down_exps.weight"].tensor_type == FORMATS["q4_k"]
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert "blk.0.ffn_gate.weight" not in tensors


def test_each_round_has_the_times_of_a_prompt_and_of_a_token_for_each_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's benchmark is a stand-in that answers in its form: 40 ms for the prompt, 80 ms for sixteen tokens, and
    160 ms for as many behind 100 others."""
    program = tmp_path / "llama-bench"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'  *"-p {PROMPT} -n 0 -d 0 "*) ms=40 ;;\n'
        f'  *"-p 0 -n {shapes.DECODES} -d 0 "*) ms=80 ;;\n'
        f'  *"-p 0 -n {shapes.DECODES} -d 100 "*) ms=160 ;;\n'
        "esac\n"
        """echo '[{"samples_ns": ['"$ms"000000']}]'\n"""
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)
    monkeypatch.setenv("CHUNKSERVE_CACHE", str(tmp_path / "cache"))
    default = write_gguf(tmp_path / "default.gguf")
    cell = compare("small", "q4_0", program, default, tmp_path, rounds=2, seed=1, late=100)
    assert cell["ms"]["llama.cpp"] == {"decode": [5.0, 5.0], "prefill": [40.0, 40.0], "late": [10.0, 10.0]}
    for name in OURS:
        assert all(len(times) == 2 and min(times) > 0 for times in cell["ms"][name].values())
    assert "| small, Q4_0: a token of one stream |" in table({"cells": [cell]})
    assert "| small, Q4_0: a token behind 1,000 |" in table({"cells": [cell], "late": 1000})
    cell = compare("small", "q4_0", program, default, tmp_path, rounds=1, seed=1)
    assert list(cell["ms"]["llama.cpp"]) == ["decode", "prefill"]


def test_the_ratio_is_that_of_one_round_and_is_held_to_the_aim() -> None:
    """Medians over the rounds of a machine that became twice as slow in the second: the ratio is 0.5 in each."""
    ours = {"decode": [10.0, 20.0], "prefill": [100.0, 200.0]}
    ms = {"rounded": ours, "stored": ours, "llama.cpp": {"decode": [10.0, 20.0], "prefill": [200.0, 400.0]}}
    first, second = table({"cells": [{"shape": "1B", "format": "q4_k", "ms": ms}]}).splitlines()[2:]
    assert first.endswith("| 1.00 (1.00–1.00) | 1.00 (1.00–1.00) | ≤ 0.9: missed |")
    assert second.endswith("| 0.50 (0.50–0.50) | 0.50 (0.50–0.50) | ≤ 0.5: met |")
