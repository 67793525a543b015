"""The benchmark of ranks measures every step on each side, in turn, and every exchange both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.ranks import MEMORY, ONE, TCP, exchanges_table, main, table
from tests.engine.build.test_engine import TINY
from tests.support.compiler import needs_compiler


@needs_compiler
@pytest.mark.slow
def test_the_last_line_is_one_document_with_a_cell_for_each_step_and_exchange(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    out = tmp_path / "out.json"
    arguments = ["--model", str(tmp_path), "--load-format", "dummy", "--context", "20", "--steps", "2"]
    main([*arguments, "--threads", "2", "--rounds", "2", "--rows", "1", "3", "--prefill", "16", "--out", str(out)])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == document
    found = [(cell["step"], cell["size"], cell["side"]) for cell in document["cells"]]
    sides = [(step, size, side) for step, size in (("decode", 1), ("decode", 3)) for side in (ONE, MEMORY)]
    assert found == [*sides, ("decode", 3, TCP), ("prefill", 16, ONE), ("prefill", 16, MEMORY)]
    assert all(len(cell["rounds"]) == 2 and cell["ms_min"] > 0 for cell in document["cells"])
    whats = [("one number", 1), ("message", 1), ("hidden states", 1), ("message", 3), ("hidden states", 3)]
    assert [(cell["what"], cell["size"]) for cell in document["exchanges"]] == whats * 2
    assert len(table(document).splitlines()) == 2 + 3
    assert len(exchanges_table(document).splitlines()) == 2 + len(whats)


def test_a_ratio_is_of_steps_of_the_same_round() -> None:
    """A machine that is slow for a round is slow for both."""
    rounds = {ONE: [10.0, 20.0, 11.0], MEMORY: [5.0, 10.0, 6.6]}
    cells = [
        {"step": "decode", "size": 8, "side": side, "ms_p50": 1, "ms_min": 1, "ms_max": 1, "rounds": times}
        for side, times in rounds.items()
    ]
    assert "| 0.50 (0.50–0.60) |" in table({"cells": cells})
