"""The comparison of a mixture's steps: the model that it makes, and what it reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import mixture
from benchmarks.engine.shapes import Shape
from tests.support.compiler import needs_compiler
from tests.support.tiny_gguf import write_gguf


@contextmanager
def default_gguf(directory: Path, *_: Any, **__: Any) -> Iterator[Path]:
    yield write_gguf(directory / "default.gguf")


@needs_compiler
def test_experts_in_a_files_blocks_are_compared_with_those_in_bfloat16_step_by_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "download_default_gguf", default_gguf)
    monkeypatch.setattr(mixture, "shape_of", lambda *_: Shape(256, 2, 4, 2, 64, 256, experts=4, per_token=2))
    monkeypatch.setattr("engine.build.cpu.cpu_flags", lambda: frozenset({"avx512_vnni"}))
    monkeypatch.setenv("CHUNKSERVE_CACHE", "set, so that it is as before after the test")
    sizes = ["--rows", "1", "--prefill", "16", "--context", "20", "--loop", "2", "--steps", "2", "--rounds", "1"]
    mixture.main([*sizes, "--seed", "5", "--weights-seed", "6"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ("native", "stored", "stored+rounded", "products")
    found = [(cell["step"], cell["kernels"]) for cell in document["cells"]]
    assert found == [(step, name) for step in ("decode", "prefill") for name in names]
    assert all(cell["ms_min"] > 0 for cell in document["cells"])
    assert document["model"].endswith("mixture-q4_k.gguf")
    assert document["weights"]["native"] == document["config"]["dtype"], "prepared without the file's blocks"
    assert all("9 as stored" in document["weights"][name] for name in ("stored", "stored+rounded"))
