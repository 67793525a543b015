"""Owns that a run of pytest either consists of the GPU's tests alone or sees no GPU, in itself and in what it starts.
Never needs a GPU."""

from __future__ import annotations

import pytest

from tests.support.gpu_runs import GPU_TESTS, hide_gpu, is_of_the_gpu

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
