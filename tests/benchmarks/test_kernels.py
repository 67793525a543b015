"""Owns what the measurement of operations prints when it runs on the processor.
Never judges a time."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import kernels as bench
from kernels.eager.forward import mix_experts
from kernels.eager.ops import Ops
from kernels.forward import Linear, Routing
from tests.support.fake_flash import FakeFlash

TINY = "--heads 4 --kv-heads 2 --head-dim 16 --hidden 48 --intermediate 80 --context 40 --rows 1 3 --chunk 5 --runs 2"
PREFIX = "--prefix 70 --after-prefix 2"
LINEAR = "--linear-key-heads 2 --linear-value-heads 4 --linear-head-dim 8"
EXPERTS = "--experts 6 --experts-per-token 2 --expert-size 24"
PEAKS = "--copy-mib 1 --matrix 32 --seed 5"


def run(*arguments: str) -> None:
    bench.main([*TINY.split(), *PREFIX.split(), *LINEAR.split(), *EXPERTS.split(), *PEAKS.split(), *arguments])


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
    ops = ("add_rms_norm", "silu_and_mul", "rotate_and_cache", "write_cache", "sigmoid_gate", "gated_rms_norm")
    by_token = [(op, n) for n in (3, 1) for op in ops]
    by_rows = [
        (f"{op}_{kind}{table}", n)
        for op, table in (("attention", ""), ("attention", "_torch"), ("causal_conv", ""), ("delta_rule", ""))
        for kind, n in (("decode", 3), ("decode", 1), ("chunk", 5), ("after_prefix", 2))
        if op == "attention" or n != 2
    ]
    of_narrow_caches = [
        (f"attention_{kind}_{name}_cache", n)
        for name in ("int8", "fp8")
        for kind, n in (("decode", 3), ("decode", 1), ("chunk", 5))
    ]
    by_rows[8:8] = of_narrow_caches
    experts = [("experts", tokens) for tokens in (5, 3, 1)]
    assert [(cell["op"], cell["tokens"]) for cell in cells] == by_token + by_rows + experts
    assert document["missing"] == []
    assert len(lines) == 1 + len(cells) + 1
    assert all(0 < cell["us_min"] <= cell["us_p50"] <= cell["us_max"] for cell in cells)
    assert all(cell["share"] > 0 and cell["of"] in ("copy", "matrix") for cell in cells)


def test_shares_have_each_operation_once_with_all_of_its_cells() -> None:
    options = bench._options(["--device", "cpu", *TINY.split(), *LINEAR.split(), *EXPERTS.split()])
    cells = bench.Bench(options, torch.device("cpu"), torch.float32, torch.Generator()).cells({})
    shares = [bench.of_share(cells, (number, 5)) for number in range(5)]
    ops = [{cell.op for cell in share} for share in shares]
    assert all(ops)
    assert sum(map(len, ops)) == len({cell.op for cell in cells})
    assert sum(map(len, shares)) == len(cells)
    assert bench.of_share(cells, options.share) == cells


@pytest.mark.parametrize("share", ["5/5", "-1/5", "1"])
def test_a_share_that_there_is_not_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench._options(["--device", "cpu", f"--share={share}"])
    assert "argument --share: " in capsys.readouterr().err


def test_an_operation_that_fails_costs_its_own_cell_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = bench.measure

    def measure(of: bench.Bench, make: object, num_bytes: int, **options: bool) -> object:
        if num_bytes == failing:
            raise RuntimeError("out of resource: shared memory")
        return measured(of, make, num_bytes, **options)  # type: ignore[arg-type]

    run("--device", "cpu", "--dtype", "float32")
    before = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    failing = before[3]["bytes"]
    lost = [number for number, cell in enumerate(before) if cell["bytes"] == failing]
    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(SystemExit, match="1"):
        run("--device", "cpu", "--dtype", "float32", "--out", str(tmp_path / "out.json"))
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == document
    assert [number for number, cell in enumerate(document["cells"]) if "failed" in cell] == lost
    assert document["cells"][3]["failed"] == "RuntimeError: out of resource: shared memory"


def test_bytes_and_operations_are_the_fewest_that_there_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    run("--device", "cpu", "--dtype", "float32")
    cells = {
        (cell["op"], cell["tokens"]): cell for cell in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    }
    decode, chunk = cells["attention_decode", 3], cells["attention_chunk", 5]
    assert decode["bytes"] == 4 * 16 * 2 * (3 * 41 * 2 + 3 * 4)  # K and V of every token, queries and what comes out
    narrow = cells["attention_decode_fp8_cache", 3]
    assert narrow["bytes"] == 2 * (3 * 41 * 2 * (16 + 4) + 3 * 4 * 16 * 4)  # a byte for each number, and its scales
    assert (
        decode["flops"] == narrow["flops"] == 4 * 16 * 4 * 3 * 41
    )  # two products, a multiplication and an addition each
    assert chunk["flops"] == 4 * 16 * 4 * (41 + 42 + 43 + 44 + 45)
    after_prefix = cells["attention_after_prefix", 2]
    assert after_prefix["flops"] == 4 * 16 * 4 * (71 + 72)
    experts = cells["experts", 1]
    assert experts["bytes"] == 4 * (6 * 48 + 2 * 3 * 48 * 24 + 2 * 48)  # the router, two experts, what goes in and out
    assert experts["flops"] == 2 * 48 * (6 + 2 * 3 * 24)
    assert cells["write_cache", 3]["bytes"] == 4 * 3 * 2 * (2 * 16) * 2  # K and V, read and written
    assert cells["gated_rms_norm", 3]["bytes"] == 4 * 3 * (3 * 4 * 8)
    channels = (2 + 2 + 4) * 8
    conv = cells["causal_conv_decode", 3]
    assert conv["bytes"] == 4 * channels * (3 * 2 + 3 * 3 * 2 + 4)  # what goes in and out, three past inputs, weights
    rule = cells["delta_rule_chunk", 5]
    assert rule["bytes"] == 4 * (5 * (channels + 4 + 4 + 4 * 8) + 2 * 4 * 8 * 8)  # one state, read and written
    assert rule["flops"] == 5 * 4 * 7 * 8 * 8


def test_on_a_gpu_every_attention_that_runs_there_has_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only Triton's attention had cells, whatever the engine would choose."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", FakeFlash())  # type: ignore[arg-type]
    options = bench._options(["--device", "cpu", "--rows", "2", "--chunk", "8"])
    of_gpu = bench.Bench(options, torch.device("cuda"), torch.bfloat16, torch.Generator())
    tables, missing = of_gpu.attention_tables()
    assert [(name, table.capturable) for name, table in tables.items()] == [("vllm_flash_attn", True), ("torch", False)]
    assert missing == []
    cells = {cell.op: cell.capturable for cell in of_gpu.cells(tables)}
    assert {op: cells[op] for op in cells if op.startswith("attention_chunk")} == {
        "attention_chunk": True,
        "attention_chunk_vllm_flash_attn": True,
        "attention_chunk_torch": False,
        "attention_chunk_int8_cache": True,
        "attention_chunk_fp8_cache": True,
    }
    assert {"control_logits", "logprobs", "sample_greedy"} <= cells.keys()
    assert {f"{op}_{kind}" for op in ("experts", "linear") for kind in ("int8", "fp8", "int4")} <= cells.keys()
    assert {"linear_fp8_by_fp8", "linear_plain", "linear_plain_by_torch", "gated_linear"} <= cells.keys()
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", None)
    tables, missing = of_gpu.attention_tables()
    assert [*tables] == ["torch"]
    assert "vllm_flash_attn does not import" in missing[0]


def test_controls_and_logprobs_run_as_their_cells_have_them() -> None:
    """This runs in Triton's interpreter, because only a GPU has these cells."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    options = bench._options(["--device", "cpu", "--vocab", "700"])
    on_cpu = bench.Bench(options, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(1))
    controlled = on_cpu.controls(2).make()()
    assert controlled.shape == (2, 700)
    own, ids, top = on_cpu.logprobs(2).make()()
    assert own.shape == (2,)
    assert ids.shape == top.shape == (2, bench.LOGPROBS)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_experts_of_fewer_bits_run_as_their_cells_have_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This runs in Triton's interpreter, because only a GPU has these cells."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    from kernels.triton.ops import TRITON

    options = bench._options(["--device", "cpu", *f"{EXPERTS} --hidden 256 --heads 4 --kv-heads 2".split()])
    on_cpu = bench.Bench(options, torch.device("cpu"), torch.float32, torch.Generator().manual_seed(1))
    monkeypatch.setattr(bench.Bench, "table", TRITON)
    monkeypatch.setattr(bench.Bench, "run_of", lambda *_: SimpleNamespace(experts=partial(compute_experts, TRITON)))
    cell = on_cpu.experts(3, kind)
    assert cell.make()().shape == (3, 256)
    numbers, groups = 3 * 256 * 24 * (4 if kind == "int4" else 8) // 8, 1 if kind == "int8" else 2
    scales = 4 * (2 * 24 * groups + 256)
    used = 6 * (1 - (1 - 2 / 6) ** 3)
    assert cell.num_bytes == 4 * 6 * 256 + round(used * (numbers + scales)) + 2 * 3 * 256 * 4


def compute_experts(table: Ops, x: Tensor, router: Tensor, gate_up: Linear, down: Linear, routing: Routing) -> Tensor:
    return mix_experts(table, x, router, (gate_up, down), routing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_and_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run()
    assert "torch can use no GPU here; --device cpu" in capsys.readouterr().err


def test_heads_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--device", "cpu", "--kv-heads", "3")
    assert "--heads must be a multiple of --kv-heads" in capsys.readouterr().err


def test_more_experts_for_a_token_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--device", "cpu", "--experts-per-token", "7")
    assert "--experts-per-token must be at most --experts" in capsys.readouterr().err


def test_no_choice_of_a_benchmark_is_left_to_engines() -> None:
    """Its first cell of one row chose for every engine of an 8B model on the machine."""
    pytest.importorskip("triton", reason="Triton has no wheel for this machine")
    from kernels.triton.shared.launch import FORGET, TUNING

    for environment, want in (({}, FORGET), ({TUNING: "0"}, "0")):
        bench.choose_for_itself(environment)
        assert environment == {TUNING: want}
