"""Owns the native library: compiles the C++ beside it for this machine, once, and loads it, or loads a wheel's own.
Never runs a kernel, and never stops the server from starting: without a library, callers report why and go on."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import cache
from pathlib import Path

from kernels.cpu.native.levels import Level, levels_for
from kernels.cpu.processor import cpu_flags

SOURCE_DIR = Path(__file__).parent
BUILT_DIR = SOURCE_DIR / "built"
"""Where a wheel has the library for each level of `levels`."""
_ANYWHERE = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-Wno-psabi")
FLAGS = (*_ANYWHERE, "-march=native")
COMPILE_TIMEOUT_S = 300.0
_BUILD_TIMEOUT_S = 3600.0
"""A build of a wheel waits longer than a start: without the libraries, it would be another wheel."""

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "": None}
_SIGNATURES = {  # of the functions that the C++ exports: (result, arguments), one letter each
    "matrix_unit": ("i", ""),
    "vector_level": ("i", ""),
    "byte_products": ("i", ""),
    "byte_tiles": ("i", ""),
    "choose_byte_tiles": ("", "i"),
    "team_create": ("p", "i"),
    "team_destroy": ("", "p"),
    "team_shares": ("l", "p"),
    "program_create": ("p", "pl"),
    "program_destroy": ("", "p"),
    "program_run": ("i", "pp"),
    "pack_panels": ("", "ipllp"),
    "quantize_panels": ("", "ipllipp"),
    "pack_blocks": ("", "ipllp"),
    "narrow_block": ("", "iipllllp"),
    "widen_block": ("", "iipllllp"),
    "program_embed": ("", "pipllfp"),
    "program_embed_grouped": ("", "pipllfp"),
    "program_fill": ("", "pilp"),
    "program_gather": ("", "piplp"),
    "program_norm": ("", "pippipflp"),
    "program_all_reduce": ("", "piplpp"),
    "program_adapt": ("", "plppl"),
    "program_linear": ("", "pippppllplpppii"),
    "program_gated": ("", "pippppllplppip"),
    "program_rotations": ("", "ppplp"),
    "program_rotations_by_axis": ("", "pppplp"),
    "program_rotate_and_cache": ("", "piplppfpllllppip"),
    "program_attention": ("", "piplllppiflp"),
    "program_experts": ("", "pippllllipppppppppp"),
    "program_divided_experts": ("", "pippllllipppppppppp" + "llpplpppppl"),
    "program_argmax": ("", "pplpp"),
    "draw_rows": ("", "pplplp"),
    "program_sigmoid_gate": ("", "pippliplp"),
    "program_causal_conv": ("", "piplplllpp"),
    "program_delta_rule": ("", "piplplplpplllllppp"),
    "program_gated_norm": ("", "pipplpfllp"),
    "program_keep_drafted": ("", "pipl"),
    "ranks_create": ("p", "piilll"),
    "ranks_destroy": ("", "p"),
    "ranks_open": ("i", "p"),
    "ranks_join": ("i", "p"),
    "ranks_all_reduce": ("i", "pipl"),
    "ranks_gather": ("i", "pplpp"),
    "ranks_offer": ("i", "pplpp"),
    "ranks_take": ("i", "pp"),
    "ranks_exchange": ("i", "pplpppl"),
    "ranks_send": ("i", "ppl"),
    "ranks_pending": ("i", "pp"),
    "ranks_receive": ("i", "ppl"),
    "ranks_check": ("i", "p"),
    "ranks_give_up": ("", "pp"),
    "ranks_late": ("", "pp"),
    "ranks_meetings": ("", "pp"),
    "ranks_close": ("", "p"),
    "ranks_reason": ("", "ppl"),
}


class NoLibraryError(Exception):
    """The native kernels are not available on this machine. The message says why, in one line."""


class NoCompilerError(NoLibraryError):
    """There is no compiler at all."""


@cache
def load_library() -> ctypes.CDLL:
    """Load the library for this machine, compiling it if the cache has none for these sources and this compiler. Where
    that cannot be done, load what the installed wheel has for this level of processor.

    Environment: CXX, the compiler (default g++); CHUNKSERVE_KERNELS_CACHE, where libraries are kept.

    Raises:
        NoLibraryError: there is neither, or the kernels do not support this processor.
    """
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        raise NoLibraryError(
            f"the kernels are for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
        )
    path = _found()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"{path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = _TYPES[result], [_TYPES[letter] for letter in arguments]
    library.choose_byte_tiles(ByteTiles.IF_FASTER)
    return library


def _found() -> Path:
    try:
        return _compiled()
    except NoLibraryError as error:
        for level in levels_for(cpu_flags()):
            if (path := BUILT_DIR / f"{level.name}.so").exists():
                return path
        raise NoLibraryError(f"{error}; nor has this installation a library that was built before") from error


def origin() -> str:
    """Say where the library is from. Raises: as load_library."""
    path = Path(load_library()._name)
    return f"C++ built for {path.stem}" if path.parent == BUILT_DIR else "C++ compiled for this processor"


_LEVELS = ("AVX2", "AVX-512 without words", "AVX-512", "AVX-512 with bfloat16")


def vector_level() -> str:
    """Return the instructions by which grouped weights are widened and multiplied. Raises: as load_library."""
    return _LEVELS[load_library().vector_level()]


_BYTE_PRODUCTS = ("products of 16 bits", "AVX-VNNI", "AVX-512 VNNI")


class ByteTiles(IntEnum):
    """When the matrix unit multiplies 16 rows and more by bytes, where there is one. Mirrored in rounded.h."""

    NEVER = 0
    ALWAYS = 1
    IF_FASTER = 2
    """As both ways are timed when the library is loaded. Their bits are the same."""


def byte_products() -> str:
    """Return the instructions by which weights are multiplied with rounded activations. Raises: as load_library."""
    library = load_library()
    tiles = ", and AMX for 16 rows and more" if library.byte_tiles() else ""
    return f"{_BYTE_PRODUCTS[library.byte_products()]}{tiles}"


def identity() -> str:
    """Return what decides the bits that the library computes on this machine: its code, and the instructions that it
    uses here. Raises: as load_library."""
    library = load_library()
    with Path(library._name).open("rb") as file:
        code = hashlib.file_digest(file, "sha256").hexdigest()
    bytes_by = _BYTE_PRODUCTS[library.byte_products()]
    return f"{code}, {vector_level()}, {bytes_by}, matrix unit {library.matrix_unit()}"


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CHUNKSERVE_KERNELS_CACHE") or Path(root) / "chunkserve" / "kernels")


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not shutil.which(command[0]):
        raise NoCompilerError(f"there is no C++ compiler: {command[0]} is not on the PATH")
    return command


def _compiled() -> Path:
    """Return the library's file, compiling it if needed. It is written aside and renamed, so that two processes may
    compile at once."""
    target = cache_dir() / f"native-{_digest()}.so"
    if target.exists():
        return target
    compile_to(target, FLAGS)
    return target


def build(level: Level, directory: Path) -> Path:
    """Compile the library of a wheel for a level, into `directory`. It needs no C++ library of its machine.

    Raises:
        NoCompilerError: there is no compiler.
        NoLibraryError: it failed.
    """
    target = directory / f"{level.name}.so"
    compile_to(target, (*_ANYWHERE, *level.flags, "-static-libstdc++", "-static-libgcc", "-s"), _BUILD_TIMEOUT_S)
    return target


def compile_to(target: Path, flags: Sequence[str], timeout_s: float = COMPILE_TIMEOUT_S) -> None:
    """Compile the C++ beside this file into a shared library. timeout_s: of each run of the compiler.

    Raises:
        NoLibraryError: there is no compiler, it failed, or `target` cannot be written.
    """
    compiler = _compiler()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            sources = sorted(SOURCE_DIR.glob("*.cpp"))
            objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
            with ThreadPoolExecutor(len(sources)) as pool:  # each takes a core for some seconds
                jobs = [
                    pool.submit(_run, [*compiler, *flags, "-c", str(one), "-o", str(to)], timeout_s)
                    for one, to in zip(sources, objects, strict=True)
                ]
            for job in jobs:
                job.result()
            made = Path(scratch) / target.name
            _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(made)], timeout_s)
            made.replace(target)
    except OSError as error:
        raise NoLibraryError(f"the compiled kernels cannot be kept in {target.parent}: {error}") from error


def _digest() -> str:
    """Hash what the machine code depends on: sources, flags, CXX, and what -march=native means here. The compiler's
    version is left out: after the compiler is gone, what it built still runs."""
    digest = hashlib.sha256(repr((os.environ.get("CXX", ""), FLAGS, sorted(cpu_flags()))).encode())
    for source in sorted([*SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibraryError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise NoLibraryError(f"{command[0]} failed with status {done.returncode}: {first}")


def main() -> None:
    """Prepare the library, or say why there is none: `python -m kernels.cpu.native.library`."""
    try:
        print(f"The native kernels are ready: {load_library()._name}")
    except NoLibraryError as error:
        print(f"There are no native kernels, and torch's operators will do their work: {error}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m kernels.cpu.native.library",
        description="Compile the native kernels for this machine, unless that was done before.",
    ).parse_args()
    main()
