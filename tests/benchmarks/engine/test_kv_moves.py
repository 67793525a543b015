"""The benchmark of moves prints one JSON document, with every move and step that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.kv_moves import Mover, digests_of, main
from engine.kv_tiers import MoveKind, Tier
from engine.tiers.mover import TierMover
from tests.engine.build.test_engine import TINY
from tests.support.kv_tiers import MemoryCopier, MemoryFiles


def test_the_last_line_is_one_document_with_each_move_and_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "head_dim": 16}))
    arguments: list[Any] = ["--model", tmp_path, "--load-format", "dummy", "--kernels", "torch_cpu", "--host-gib", 0.1]
    arguments += ["--context", 20, "--rows", 3, "--prefill", 32, "--rounds", 2, "--steps", 2, "--blocks", 1, 5]
    out = tmp_path / "out.json"
    main([*map(str, arguments), "--out", str(out)])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == document
    assert document["benchmark"] == "kv_moves"
    moves = [(cell["tier"], cell["move"], cell["blocks"]) for cell in document["moves"]]
    assert moves == [("host", move, blocks) for blocks in (1, 5) for move in ("store", "load")]
    for cell in document["moves"]:
        assert cell["mb_per_s"] == pytest.approx(cell["blocks"] * document["block_bytes"] / cell["ms_p50"] / 1e3)
        assert 0 < cell["step_thread_us_p50"] <= 1e3 * cell["ms_max"]
    assert [(cell["tokens"], cell["new_blocks"]) for cell in document["steps"]] == [(3, 1), (32, 2)]
    assert all(cell["ms_p50"] > 0 and cell["beside_loads_ms_p50"] > 0 for cell in document["steps"])


def test_moves_are_waited_for_and_one_that_fails_ends_the_measurement() -> None:
    mover = TierMover(MemoryCopier(4), host_blocks=4, files=MemoryFiles())
    measured, names = Mover(mover), digests_of(7, 4)
    for tier in Tier:
        for kind in MoveKind:
            begun, whole = measured.run(kind, tier, names)
            assert 0 < begun <= whole
    measured.drop(Tier.HOST, names)
    with pytest.raises(RuntimeError, match="a move failed: the host tier has no such block"):
        measured.run(MoveKind.LOAD, Tier.HOST, names[:1])
    mover.shutdown()
