"""The benchmark prints one JSON document with every cell that was asked for, on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.bench import main
from tests.engine.test_build import TINY


def test_the_last_line_is_one_document_with_a_cell_for_each_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    arguments = ["--model", str(tmp_path), "--load-format", "dummy", "--context", "20", "--steps", "2", "--seed", "5"]
    main([*arguments, "--rows", "1", "3", "--prefill", "16"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    shapes = [(cell["step"], cell["size"]) for cell in document["cells"]]
    assert shapes == [("decode", 1), ("decode", 3), ("prefill", 16)]
    assert all(0 < cell["ms_min"] <= cell["ms_p50"] <= cell["ms_max"] for cell in document["cells"])
    assert (document["seed"], document["config"]["max_model_len"]) == (5, 128)
