"""Owns that a run of pytest either consists of the GPU's tests alone or sees no GPU, in itself and in what it starts.
Never needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.support.gpu_runs import GPU_TESTS, REQUIRED, hide_gpu, is_of_the_gpu, kernels_of, shard_of, show_gpu

ROOT = GPU_TESTS.parents[1]


@pytest.mark.parametrize(
    ("arguments", "of_the_gpu"),
    [
        (["tests/gpu"], True),
        (["tests/gpu/test_engine.py::test_x[torch]", str(GPU_TESTS)], True),
        (["tests"], False),
        (["tests/gpu", "tests/kernels"], False),
        (["tests/engine/../gpu/../kernels"], False),
        ([], False),
    ],
)
def test_only_runs_of_the_gpus_tests_alone_see_one(arguments: list[str], of_the_gpu: bool) -> None:
    assert is_of_the_gpu(arguments, ROOT) is of_the_gpu


def test_without_a_gpu_kernels_are_interpreted_and_servers_find_none() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    hide_gpu(environment)
    assert environment == {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_with_a_gpu_kernels_have_their_first_configurations_and_nothing_is_interpreted_unasked() -> None:
    """Where the driver's file was missing on a GPU's machine, the interpreter stood in for the card without a word."""
    environment: dict[str, str] = {}
    show_gpu(environment)
    assert environment == {"CHUNKSERVE_TRITON_TUNING": "0"}


def test_a_run_that_requires_a_gpu_ends_at_once_without_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_experts.py"],
        cwd=ROOT,
        env=os.environ | {REQUIRED: "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"{REQUIRED} is 1, but the device is none" in done.stdout + done.stderr


def test_shards_have_every_test_once_and_no_two_have_tests_of_one_group() -> None:
    tests = list(range(11))
    shards = [shard_of(tests, f"{number}/4", lambda test: test // 3) for number in range(4)]
    assert shards == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert sorted(test for number in range(4) for test in shard_of(tests, f"{number}/4")) == tests
    assert shard_of(tests, "") == tests


def test_tests_that_differ_in_their_rows_alone_are_one_group() -> None:
    """Regression guard: the processes of a first hour compiled the same kernels of attention side by side."""
    given = {"dtype": torch.float16, "head_dim": 64, "window": 1, "step": "mixed"}
    same, others = [{"step": "decode only"}, {"window": 100}], [{"window": None}, {"dtype": None}, {"head_dim": 80}]
    group = kernels_of("a.py::test", given)
    assert {kernels_of("a.py::test", given | change) for change in same} == {group}
    assert len({group, kernels_of("b.py::test", given), *(kernels_of("a.py::test", given | x) for x in others)}) == 5
