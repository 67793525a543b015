"""Owns what the measurement of operations prints, on the processor.
Never judges a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels import bench

TINY = "--heads 4 --kv-heads 2 --head-dim 16 --hidden 48 --intermediate 80 --context 40 --rows 1 3 --chunk 5 --runs 2"
EXPERTS = "--experts 6 --experts-per-token 2 --expert-size 24"
PEAKS = "--copy-mib 1 --matrix 32 --seed 5"


def run(*arguments: str) -> None:
    bench.main([*TINY.split(), *EXPERTS.split(), *PEAKS.split(), *arguments])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_line_is_one_document_with_a_cell_for_each_operation_and_shape(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    run("--device", "cpu", "--dtype", dtype, "--out", str(out))
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert json.loads(out.read_text()) == document
    assert (document["table"], document["dtype"], document["config"]["seed"]) == ("torch_cpu", dtype, 5)
    cells = document["cells"]
    by_token = [(op, n) for n in (1, 3) for op in ("add_rms_norm", "silu_and_mul", "rotate_and_cache")]
    attention = [("attention_decode", 1), ("attention_decode", 3), ("attention_chunk", 5)]
    experts = [("experts", tokens) for tokens in (1, 3, 5)]
    assert [(cell["op"], cell["tokens"]) for cell in cells] == by_token + attention + experts
    assert len(lines) == 1 + len(cells) + 1
    assert all(0 < cell["us_min"] <= cell["us_p50"] <= cell["us_max"] for cell in cells)
    assert all(cell["share"] > 0 and cell["of"] in ("copy", "matrix") for cell in cells)


def test_bytes_and_operations_are_the_fewest_that_there_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    run("--device", "cpu", "--dtype", "float32")
    cells = {
        (cell["op"], cell["tokens"]): cell for cell in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    }
    decode, chunk = cells["attention_decode", 3], cells["attention_chunk", 5]
    assert decode["bytes"] == 4 * 16 * 2 * (3 * 41 * 2 + 3 * 4)  # K and V of every token, queries and what comes out
    assert decode["flops"] == 4 * 16 * 4 * 3 * 41  # two products, a multiplication and an addition each
    assert chunk["flops"] == 4 * 16 * 4 * (41 + 42 + 43 + 44 + 45)
    experts = cells["experts", 1]
    assert experts["bytes"] == 4 * (6 * 48 + 2 * 3 * 48 * 24 + 2 * 48)  # the router, two experts, what goes in and out
    assert experts["flops"] == 2 * 48 * (6 + 2 * 3 * 24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_and_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run()
    assert "there is no GPU that torch can use here; --device cpu" in capsys.readouterr().err


def test_heads_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--device", "cpu", "--kv-heads", "3")
    assert "--heads must be a multiple of --kv-heads" in capsys.readouterr().err


def test_more_experts_for_a_token_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--device", "cpu", "--experts-per-token", "7")
    assert "--experts-per-token must be at most --experts" in capsys.readouterr().err
