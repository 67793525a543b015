"""Owns the rule that tests which compare bits are run as other processors run them.
Never runs them: `make test-processors` does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processors

ROOT = Path(__file__).parents[1]
EXCUSED = {
    "tests/kernels/triton/test_batch_invariance.py": "adds up products one after the other, without a library",
    "tests/engine/batch/test_logit_controls.py": "multiplies no matrices",
    "tests/engine/build/test_model.py": "multiplies no matrices",
    "tests/engine/execution/gpu/test_kv_blocks.py": "copies blocks",
    "tests/engine/execution/test_kv_blocks.py": "copies blocks, and compares steps of one model",
    "tests/engine/execution/test_narrow_tiers.py": "rounds numbers, and multiplies none in what it compares",
    "tests/engine/lockstep/test_mixtures.py": "compares weights that were read",
    "tests/engine/models/test_adapter_files.py": "compares numbers that were read",
    "tests/engine/models/test_gguf_rows.py": "multiplies no matrices",
    "tests/engine/models/test_integer_rows.py": "multiplies no matrices where it compares bits",
    "tests/engine/models/test_narrow.py": "multiplies no matrices",
    "tests/engine/models/test_packed_shards.py": "cuts numbers where it compares bits",
    "tests/engine/models/test_rope.py": "multiplies no matrices",
    "tests/engine/models/test_shards.py": "cuts numbers where it compares bits",
    "tests/engine/models/test_stored_experts.py": "compares blocks, and the logits of one program",
    "tests/engine/models/test_stored_matrix.py": "compares blocks, and the logits of one program",
    "tests/engine/models/test_weights.py": "multiplies no matrices",
    "tests/engine/parallel/test_engine_of_ranks.py": "compares steps of one model",
    "tests/kernels/collectives/test_exchange.py": "moves numbers, and computes none",
    "tests/kernels/collectives/test_experts.py": "multiplies and sums exactly in what it compares",
    "tests/kernels/collectives/test_group.py": "sums numbers in a given order, and multiplies none",
    "tests/kernels/collectives/test_nccl.py": "compares one sum on several ranks",
    "tests/kernels/collectives/test_recorded_experts.py": "compares the native kernels with themselves",
    "tests/kernels/collectives/test_reduction.py": "sums numbers in a given order, and multiplies none",
    "tests/kernels/cpu/native/test_blocks.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_e4m3.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_grouped.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_grouped_experts.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_linear_attention.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_low_rank.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_multimodal.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_program.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/native/test_rounded.py": "test_lesser_processors runs it",
    "tests/kernels/cpu/test_narrow_blocks.py": "rounds numbers one by one, which every processor does alike",
    "tests/kernels/triton/test_elementwise.py": "multiplies no matrices",
    "tests/kernels/triton/test_far_offsets.py": "multiplies the same numbers in the same shapes, from two places",
    "tests/kernels/triton/test_sampling.py": "multiplies no matrices",
}


def compares_bits(path: Path) -> bool:
    """Return whether a file asks two tensors to be equal, or to differ by nothing."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            exact = {ast.unparse(keyword) for keyword in node.keywords} >= {"atol=0", "rtol=0"}
            if exact or node.func.attr in ("equal", "array_equal"):
                return True
    return False


def test_every_file_that_compares_bits_is_run_as_on_other_processors() -> None:
    """Regression: two files did so, passed on their author's machine for months, and failed on AMD's."""
    folders = ("kernels", "engine", "golden")
    paths = [path for folder in folders for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    found = {str(path.relative_to(ROOT)) for path in paths if compares_bits(path)}
    assert found - set(processors.FILES) == set(EXCUSED)
    assert all((ROOT / file).is_file() for file in processors.FILES)


def test_every_setting_is_run_and_one_that_fails_fails_them_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def ended(command: list[str], *, env: dict[str, str], check: bool) -> Any:
        asked.append((command, env))
        is_first = env["OPENBLAS_CORETYPE"] == "Haswell"
        return subprocess.CompletedProcess(command, returncode=int("pytest" in command and is_first))

    monkeypatch.setattr(subprocess, "run", ended)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert processors.main(["--", "-x"]) == 1
    assert [environment["OPENBLAS_CORETYPE"] for _, environment in asked] == ["Haswell", "Haswell", "Zen", "Zen"]
    assert all(command[0] == sys.executable for command, _ in asked)
    kernels, tests = ([command for command, _ in asked[first::2]] for first in (0, 1))
    assert all(command[-1] == "kernels.cpu.native.library" for command in kernels), (
        "compiled before any worker needs it"
    )
    assert all({"-x", *processors.FILES} < set(command) for command in tests)
    said = [line for line in capsys.readouterr().out.splitlines() if " after " in line]
    assert ["failed" in line for line in said] == [True, False]


def test_another_architecture_has_nothing_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert processors.main([]) == 0
    assert "this is aarch64" in capsys.readouterr().out
