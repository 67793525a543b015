"""Owns that the tests for a GPU would run on one: those of the engine and of attention pass on a stand-in.
Never runs Triton's kernels: tests/kernels/triton does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # all of tests/gpu
def test_the_tests_of_a_gpu_pass_on_a_stand_in(tmp_path: Path) -> None:
    """Without this, a mistake in them would only be found on a card that is lent for minutes. All run here but the
    thousand cancels, which take minutes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.gpu_stand_in", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [
            *command,
            *(f"tests/gpu/test_{name}.py" for name in ("engine", "attention", "kv_tiers", "ranks")),
            "-k",
            "not thousand",
        ],
        cwd=Path(__file__).parents[4],
        env=os.environ | {"STAND_IN_SHAPES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)  # of all: each test has a line, too
    assert passed is not None
    assert int(passed[1]) >= 200, "with FlashAttention and with torch's attention"
