"""The native kernels on processors that can do less than this one: their tests, with the library compiled for less."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.processor import cpu_flags
from tests.kernels.cpu.native.test_rounded import digest

HERE = Path(__file__).parent
ROUNDED = (HERE / "test_rounded.py",)
ALL = (
    HERE / "test_program.py",
    HERE / "test_grouped.py",
    HERE / "test_grouped_experts.py",
    HERE / "test_low_rank.py",
    HERE / "test_linear_attention.py",
    HERE / "test_multimodal.py",
    HERE / "test_e4m3.py",
    HERE / "test_blocks.py",
    *ROUNDED,
    HERE.parents[2] / "engine" / "models" / "test_gguf_rows.py",
)
LESS = {
    "-mno-amx-tile": (ALL, 2),
    "-mno-avx512bf16 -mno-amx-tile": (ALL, 2),
    "-mno-avx512bw": (ALL, 2),
    "-mno-avx512f": (ALL, 1),
    "-mno-avx512vnni": (ROUNDED, 1),
    "-mno-avx512vnni -mno-avxvnni": (ROUNDED, 0),
    "-mno-avx512f -mno-avxvnni": (ROUNDED, 0),
}
"""What the compiler is to do without, the files that depend on it, and the level of products of bytes that is left at
most. `make test-processors` compiles two of the same."""


def test_every_file_whose_kernels_depend_on_the_processor_is_among_them() -> None:
    others = {"test_levels.py", "test_sampling.py", Path(__file__).name}
    assert {path.name for path in HERE.glob("test_*.py")} - others == {path.name for path in ALL if path.parent == HERE}


@pytest.mark.slow
@pytest.mark.parametrize("without", LESS)
def test_all_of_this_holds_for_processors_with_less(without: str) -> None:
    """One library for all files, kept for other runs: to compile it takes as long as one of them."""
    if without == "-mno-amx-tile" and "amx_tile" not in cpu_flags():
        pytest.skip("this processor has no matrix unit to do without")
    if "avxvnni" in without and "avx_vnni" not in cpu_flags():
        pytest.skip(
            "this processor has no AVX-VNNI to do without: the library is that without the rest, which is tested"
        )
    files, most = LESS[without]
    environment = {**os.environ, "CXX": f"g++ {without}"}
    made = run(["-c", "from kernels.cpu.native.library import load_library; print(load_library()._name)"], environment)
    only = ("-m", "not slow", "-k", "not compiler and not processor")
    run(["-m", "pytest", "-q", "-p", "no:xdist", *only, *map(str, files)], environment)
    library = ctypes.CDLL(made.strip())
    assert library.matrix_unit() == 0
    assert library.byte_products() <= most
    told = run(["-c", f"from {digest.__module__} import digest; print(digest())"], environment)
    assert told.strip() == digest(), "rounded activations give the same bits on all"


def run(arguments: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout
