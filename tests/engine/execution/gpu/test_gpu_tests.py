"""Owns that the tests for a GPU would run on one: those of the engine and of attention pass on a stand-in.
Never runs Triton's kernels: tests/kernels/triton does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.execution.gpu.kv_blocks import STORE_GROUPS, group_blocks
from engine.models.config import read_model_config
from engine.models.kv_cache import bytes_per_block
from engine.tiers.stores import queued_writes
from tests.gpu import test_kv_tiers as tiers


@pytest.mark.parametrize("dtype", tiers.DTYPES, ids=str)
def test_blocks_of_the_real_shape_that_a_card_stores_at_once_have_room(dtype: torch.dtype) -> None:
    """On a stand-in blocks are tiny. In float32, two of twenty for the disk would have been refused on a card."""
    size = bytes_per_block(read_model_config(tiers.SHAPES / "qwen3-0.6b"), tiers.BLOCK_SIZE, dtype)
    for asked, room in ((tiers.MOVED, STORE_GROUPS * group_blocks(size)), (tiers.MOVED // 2, queued_writes(size))):
        assert asked <= room


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
