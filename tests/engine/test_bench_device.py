"""Owns what is claimed of the device's benchmark: every cell is there, and ceilings and aims are computed as they say.
Never asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.bench_device import SHAPES, bytes_read, flops, main, matrix_params, targets
from engine.models.config import read_model_config
from tests.engine.test_build import TINY


def test_every_cell_is_measured_on_any_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    sizes = ["--steps", "2", "--copy-mib", "1", "--matrix", "32", "--seed", "3"]
    out = tmp_path / "out.json"
    main(["--device", "cpu", "--short", "--dtype", "float32", "--model", str(tmp_path), "--out", str(out), *sizes])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == document
    kinds = [cell["cell"] for cell in document["cells"]]
    steps = ["decode", "decode", "prefill", "prefill_only", "mixed"]
    assert kinds == [*steps, "host_gap", "throughput", "owner_by_graphs", "owner_by_graphs", "transformers"]
    assert [(cell["owner"], cell["graphs"]) for cell in document["cells"][-3:-1]] == [
        ("engine", False),
        ("scheduler", False),
    ]
    assert all(aim["value"] >= 0 for aim in document["targets"])
    assert (document["short"], document["config"]["overlap"]) == (True, True)


def test_what_a_step_must_do_at_least_follows_from_the_shape() -> None:
    """Llama-3.1-8B: 6.98e9 weights in 32 layers and 0.53e9 in the LM head; 128 KiB of K and V a token."""
    model = read_model_config(SHAPES / "llama-3.1-8b")
    assert matrix_params(model) == 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336) == 6_979_321_856
    head = 128256 * 4096
    assert bytes_read(model, 0, 0, 2) == 2 * (6_979_321_856 + head)
    assert bytes_read(model, 3, 99, 2) - bytes_read(model, 0, 0, 2) == 300 * 128 * 1024
    assert flops(model, 1, 0) == 2 * (6_979_321_856 + head) + 4 * 32 * 4096
    assert flops(model, 2, 10) - flops(model, 1, 10) == 2 * 6_979_321_856 + 4 * 32 * 4096 * 12


def test_what_a_hybrid_must_at_least_do_is_counted_by_its_kinds_of_layers() -> None:
    model = read_model_config(SHAPES / "qwen3.5-27b")
    linear = 5120 * (2 * 2048 + 3 * 6144 + 2 * 48)
    attention = 5120 * (3 * 6144 + 2 * 1024)
    assert matrix_params(model) == 48 * linear + 16 * attention + 64 * 3 * 5120 * 17408
    with_rows = bytes_read(model, 2, 99, 2) - bytes_read(model, 0, 0, 2)
    assert with_rows == 2 * (100 * 16 * 2 * 1024 * 2 + 48 * 48 * 128 * 128 * 4)
    assert flops(model, 1, 10) - flops(model, 1, 9) == 4 * 16 * 6144


def test_an_aim_is_met_or_missed_by_its_own_sign_and_left_out_if_nothing_was_measured() -> None:
    cells = [
        {"cell": "decode", "size": 8, "ms_p50": 1.2, "least_ms": 1.0},
        {"cell": "decode", "size": 64, "ms_p50": 1.4, "least_ms": 1.0},
        {"cell": "prefill", "size": 8192, "ms_p50": 2.0, "least_ms": 1.2},
        {"cell": "mixed_load", "size": 512, "gap_max": 40.0},
        {"cell": "mixed_load", "size": 1 << 20, "gap_max": 100.0},
        {"cell": "owner_by_graphs", "owner": "engine", "graphs": False, "ttft_ms": 100.0, "tokens_s": 10.0},
        {"cell": "owner_by_graphs", "owner": "scheduler", "graphs": True, "ttft_ms": 10.0, "tokens_s": 20.0},
        {"cell": "throughput", "size": 64, "tokens_s": 50.0},
        {"cell": "transformers", "missing": "No module named 'transformers'"},
    ]
    found = [(aim["value"], aim["aim"], aim["met"]) for aim in targets(cells)]
    assert found == [
        (1.2, "<= 1.3", True),
        (1.4, "<= 1.3", False),
        (0.6, ">= 0.55", True),
        (0.4, "<= 0.3", False),
        (10.0, ">= 5", True),
        (2.0, ">= 3", False),
    ]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "there is no GPU that torch can use here" in capsys.readouterr().err
