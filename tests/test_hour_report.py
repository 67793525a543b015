"""Owns what the report of several runs of the first hour on a GPU says: floors by the best peaks, each test once.
Never reads a kept result of a card: tests/docsite does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.hour.report import report, table


def test_a_report_of_several_runs_has_floors_by_the_best_peaks_and_each_test_once(tmp_path: Path) -> None:
    def bench(copy: float, cell: dict[str, Any], model: str = "llama-3.1-8b") -> dict[str, Any]:
        peaks = {"copy_gb_s": copy, "matrix_gflop_s": 100.0}
        return {"benchmark": "engine_device", "model": model, "peaks": peaks, "cells": [cell]}

    def write(name: str, *results: Any) -> None:
        parts = [{"name": str(number), "results": [result]} for number, result in enumerate(results)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "aims.json").write_text(json.dumps({"parts": parts}))

    mode = {"device": "a card", "torch": "2", "triton": "3"}
    peaks = {"copy_gb_s": 1000.0, "matrix_gflop_s": 90.0}
    machine = {"mode": mode, "device": {}, "cores": 1, "packages": {}, "peaks": peaks}
    step = {"cell": "decode", "size": 1, "least_ms": 6.0, "device_ms": 8.0}
    attention = [
        {"shape": "decode 1 x 2", "by": "triton", "us": 9.0},
        {"shape": "decode 1 x 2", "by": "triton", "us": 7.0},
        {"shape": "decode 1 x 2", "by": "triton", "us": 5.0, "block_size": 128},
        {"shape": "decode 1 x 2", "by": "x", "failed": ""},
    ]
    write("first", machine, bench(2000.0, step | {"device_ms": 11.0}), {"cells": attention}, None)
    small = bench(1000.0, step | {"least_ms": 1.0}, "qwen3-0.6b")
    write("second", bench(3000.0, {"cell": "throughput", "tokens_s": 1.0}), small)
    (tmp_path / "second" / "alone.json").write_text(json.dumps(bench(2000.0, step)))
    for name, outcome in (("third", "failed"), ("fourth", "passed")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "k.json").write_text(json.dumps({"tests": [{"test": "a/test_x.py::t", "outcome": outcome}]}))
    document = report([tmp_path / name for name in ("first", "second", "third", "fourth")])
    assert document["peaks"] == {"copy_gb_s": 3000.0, "matrix_gflop_s": 100.0}
    assert [cell["cell"] for cell in document["cells"]] == ["decode", "throughput", "decode"]
    assert document["tests"] == {"a/test_x.py": {"passed": 1}}
    lines = table(document).splitlines()
    assert [line for line in lines if "decode, 1 row" in line] == [
        "| decode, 1 row of 1,024 tokens | 4.00 | 8.00 | 2.00 |"
    ]
    with pytest.raises(ValueError, match="expected a result of the part machine"):
        report([tmp_path / "third"])
    assert "| decode 1 x 2 | 7 |  |  |  |" in lines
    assert "| `test_x.py` | 1 | 0 | 0 |" in lines
