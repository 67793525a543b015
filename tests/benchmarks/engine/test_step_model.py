"""The study of the step time model prints one JSON document, and its steps are ones that an engine may plan."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.engine.step_model import KINDS, drawn_steps, main, table
from engine.step import RowKind
from tests.engine.build.test_engine import TINY
from tests.support.compiler import needs_compiler
from tests.support.engines import resolved_config


@needs_compiler
def test_the_last_line_is_one_document_with_errors_of_both_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    out = tmp_path / "out.json"
    asked = ["--blocks", "600", "--steps", "12", "--seconds", "0", "--seed", "5", "--out", str(out)]
    main(["--model", str(tmp_path), "--load-format", "dummy", *asked])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == document
    assert document["num_steps"] == 24
    cells = {(cell["steps"], cell["kind"], cell["model"]) for cell in document["cells"]}
    assert cells == {(s, k, m) for s in ("first", "last") for k in (*KINDS, "all") for m in ("fitted", "corrected")}
    assert all(0 <= cell["p50"] <= cell["p90"] <= cell["p99"] for cell in document["cells"])
    assert len(table(document).splitlines()) == 2 + len(cells)
    assert document["shapes"] > len(document["costs"]["knots"])


@needs_compiler
def test_steps_between_the_first_and_the_last_are_kept_apart_and_leave_the_machine_its_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    asked = ["--blocks", "600", "--steps", "8", "--seconds", "1", "--busy", "0.2", "--seed", "5"]
    main(["--model", str(tmp_path), "--load-format", "dummy", *asked])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = {
        cell["steps"]: cell["count"] for cell in document["cells"] if (cell["kind"], cell["model"]) == ("all", "fitted")
    }
    assert counts["first"] == counts["last"] == 8
    assert document["num_steps"] == sum(counts.values())
    assert (document["seconds"] >= 1, document["busy"]) == (True, 0.2)


def test_drawn_steps_keep_to_the_engines_limits() -> None:
    config = resolved_config(max_model_len=512, block_size=16, num_kv_blocks=300)
    steps = drawn_steps(random.Random(0), config)
    for kind, plan in (next(steps) for _ in range(300)):
        blocks = [block for row in plan.rows for block in row.block_ids]
        assert len(blocks) == len(set(blocks)) <= config.num_kv_blocks
        assert plan.num_tokens <= 512
        assert all(row.end <= config.max_model_len for row in plan.rows)
        decodes = [row.kind is RowKind.DECODE for row in plan.rows]
        assert kind != "decode" or all(decodes)
        assert kind != "prefill" or not any(decodes)
        assert all((row.sampling is None) == (row.kind is RowKind.MIDDLE) for row in plan.rows)
