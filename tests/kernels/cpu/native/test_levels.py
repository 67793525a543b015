"""The native library of a wheel: its levels, and which one a processor gets. tests/test_wheel.py builds a wheel."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from setuptools import Distribution

from kernels.choice import choose_kernels
from kernels.cpu.native import library
from kernels.cpu.native.levels import LEVELS, levels_for
from kernels.cpu.native.library import NoLibraryError, load_library, origin

ROOT = Path(__file__).parents[4]
HASWELL = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ICE_LAKE = SKYLAKE | {"avx512_vnni", "avx512_vbmi"}
ZEN_4 = ICE_LAKE | {"avx512_bf16"}
PROCESSORS = {
    "Haswell": (HASWELL, "avx2"),
    "Alder Lake": (HASWELL | {"avx_vnni"}, "avx2-vnni"),
    "Skylake": (SKYLAKE, "avx512"),
    "Ice Lake": (ICE_LAKE, "avx512-vnni"),
    "Zen 4": (ZEN_4, "avx512-bf16"),
    "Sapphire Rapids": (ZEN_4 | {"avx_vnni", "amx_tile", "amx_bf16", "amx_int8"}, "amx"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gets_the_most_that_it_can_do(name: str) -> None:
    flags, expected = PROCESSORS[name]
    assert levels_for(frozenset(flags))[0].name == expected


def test_a_processor_without_avx2_gets_none() -> None:
    assert levels_for(frozenset({"avx", "sse4_2", "fma"})) == ()


def test_every_level_compiles_with_what_it_needs_and_no_more() -> None:
    """A library that is compiled for more than is asked for ends the process by an illegal instruction."""
    of_flags = {"-mavxvnni": "avx_vnni", "-mavx512vnni": "avx512_vnni", "-mavx512bf16": "avx512_bf16"}
    of_flags |= {"-mamx-tile": "amx_tile", "-mamx-bf16": "amx_bf16", "-mamx-int8": "amx_int8"}
    for level in LEVELS:
        base = {"-march=x86-64-v3": HASWELL - {"avx", "sse4_2"}, "-march=x86-64-v4": SKYLAKE - {"avx", "sse4_2"}}
        assert level.needs == base[level.flags[0]] | {of_flags[flag] for flag in level.flags[1:]}


@pytest.mark.parametrize(("tiles", "said"), [(0, "AVX-512 VNNI"), (1, "AVX-512 VNNI, and AMX for 16 rows and more")])
def test_the_log_says_by_what_bytes_are_multiplied(monkeypatch: pytest.MonkeyPatch, tiles: int, said: str) -> None:
    found = SimpleNamespace(byte_products=lambda: 2, byte_tiles=lambda: tiles)
    monkeypatch.setattr(library, "load_library", lambda: found)
    assert library.byte_products() == said


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A wheel's folder of libraries, on a machine without a compiler and without a library from an earlier start."""
    made = library._compiled()
    folder = tmp_path / "built"
    folder.mkdir()
    shutil.copy(made, tmp_path / "some.so")
    monkeypatch.setattr(library, "BUILT_DIR", folder)
    monkeypatch.setenv("CHUNKSERVE_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(ICE_LAKE))
    load_library.cache_clear()
    yield folder
    load_library.cache_clear()


def test_without_a_compiler_the_wheels_best_library_that_runs_here_is_loaded(built: Path) -> None:
    (built / "amx.so").write_text("for another processor")
    for name in ("avx2", "avx512"):
        shutil.copy(built.parent / "some.so", built / f"{name}.so")
    assert load_library()._name == str(built / "avx512.so")
    assert origin() == "C++ built for avx512"
    assert choose_kernels("auto", head_dim=64, block_size=16).reason.startswith("native: C++ built for avx512")


def test_with_neither_a_compiler_nor_a_library_both_are_the_reason(built: Path) -> None:
    (built / "amx.so").write_text("for another processor")
    with pytest.raises(NoLibraryError, match="no-such-compiler is not on the PATH; nor has this installation a lib"):
        load_library()


def test_with_a_compiler_the_library_is_compiled_for_this_processor(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built / "avx2.so").write_text("never loaded")
    monkeypatch.undo()
    load_library.cache_clear()
    assert origin() == "C++ compiled for this processor"


@pytest.mark.parametrize(("compiler", "is_made"), [("no-such-compiler", True), ("false", False)])
def test_a_wheel_is_made_without_a_compiler_and_not_with_one_that_fails(
    compiler: str, is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: on a busy machine a compiler once took too long, and the wheel had no library, without a word."""
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the build's module changes it
    from kernels.cpu.native.wheel import BuildWithLibraries

    command = BuildWithLibraries(Distribution({"packages": []}))
    command.ensure_finalized()
    command.build_lib = str(tmp_path)
    with nullcontext() if is_made else pytest.raises(NoLibraryError, match="false failed with status 1"):
        command.run()
    assert not list(tmp_path.rglob("*.so"))
