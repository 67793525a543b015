"""Owns the levels of processors that a wheel has the native library for: how each is compiled, and what it runs on.
Never compiles or loads anything."""

from __future__ import annotations

from typing import NamedTuple

_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Level(NamedTuple):
    name: str
    flags: tuple[str, ...]
    """The compiler's."""
    needs: frozenset[str]
    """What the processor must report, by Linux's names."""


LEVELS = (
    Level("avx2", ("-march=x86-64-v3",), _V3),
    Level("avx2-vnni", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Level("avx512", ("-march=x86-64-v4",), _V4),
    Level("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level(
        "avx512-bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Level(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _V4 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    ),
)
"""From the least to the most that a processor can do: the System V ABI's levels, and what our kernels use beyond."""


def levels_for(flags: frozenset[str]) -> tuple[Level, ...]:
    """Return the levels that a processor with these flags runs, the fastest first."""
    return tuple(level for level in reversed(LEVELS) if level.needs <= flags)
