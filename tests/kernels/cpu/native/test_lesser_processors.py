"""The native kernels on other processors than this one: their tests, with the library compiled for one that can do
less, or for one with a matrix unit, which is software here (software_tiles.h)."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
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
    "--param=avoid-fma-max-bits=512": (ALL, 2),  # as GCC does for Zen 5: a sum alone is not fused, and several are
}
"""What the compiler is to do without, the files that depend on it, and the level of products of bytes that is left at
most. `make test-processors` compiles two of the same."""


def test_every_file_whose_kernels_depend_on_the_processor_is_among_them() -> None:
    others = {"test_levels.py", "test_sampling.py", "test_team.py", Path(__file__).name}
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
    told = run_as(without, files)
    assert (told["matrix_unit"], told["byte_tiles"]) == (0, 0)
    assert told["byte_products"] <= most


@pytest.mark.slow
def test_all_of_this_holds_for_processors_with_a_matrix_unit() -> None:
    """What only the unit runs was seen by no test for weeks in which every machine at hand had none."""
    if not {"avx512_bf16", "avx512_vnni"} <= cpu_flags():
        pytest.skip("every processor with a matrix unit has the vectors that this one lacks")
    unit = HERE / "software_tiles.h"
    content = hashlib.sha256(unit.read_bytes()).hexdigest()[:16]  # a changed unit is another library
    told = run_as(f"-mno-amx-tile -DSOFTWARE_TILES_{content} -include {shlex.quote(str(unit))}", ALL)
    assert told == {"matrix_unit": 1, "byte_products": 2, "byte_tiles": 1}


TELL = f"""
import json
from {digest.__module__} import digest
from kernels.cpu.native.library import ByteTiles, load_library
found = {{"digest": digest()}}
library = load_library()
library.choose_byte_tiles(ByteTiles.ALWAYS)
found |= {{name: getattr(library, name)() for name in ("matrix_unit", "byte_products", "byte_tiles")}}
print(json.dumps(found))
"""


def run_as(compiler: str, files: Sequence[Path]) -> dict[str, int]:
    """Run the tests of some files with the library compiled so. Return what it says of itself."""
    environment = {**os.environ, "CXX": f"g++ {compiler}"}
    made = run(["-m", "kernels.cpu.native.library"], environment)
    assert "are ready" in made, made  # else every test would compile in vain
    only = ("-m", "not slow", "-k", "not compiler and not processor")
    run(["-m", "pytest", "-q", "-p", "no:xdist", *only, *map(str, files)], environment)
    told: dict[str, int] = json.loads(run(["-c", TELL], environment))
    assert told.pop("digest") == digest(), "rounded activations give the same bits on all"
    return told


def run(arguments: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout
