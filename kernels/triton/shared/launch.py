"""Owns how kernels are started: compiled or interpreted, with which configuration, and over what sizes.
Never computes, and never waits for a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

OLDEST = (3, 6)
"""Of Triton's versions, the first that the kernels were compiled with: pyproject.toml's extra `cuda` says so, too."""

# Before anything is taken from triton.knobs, or given to autotune, that older ones lack: torch 2.4 brings 3.0.
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"Triton is {triton.__version__}, and the kernels need {OLDEST[0]}.{OLDEST[1]}")

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 before triton was imported), on any tensors."""

# The interpreter keeps bfloat16 as its bits, and multiplies those: products of it are done in float32 there.
WIDEN = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, total):
    """total + a b, in float32. In float32 exactly, never in tf32. a: [m, k], b: [k, n], total: [m, n] float32"""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


TUNING = "CHUNKSERVE_TRITON_TUNING"
"""`keep` (the default): configurations are timed once, and the choice is kept on disk for all processes. `forget`:
they are timed in each process, as a benchmark must, whose first shapes would choose for engines. A number: that one of
each kernel's, or its last, untimed."""
KEEP, FORGET = "keep", "forget"


def tuned(configs: Sequence[triton.Config], key: Sequence[str], tuning: str | None = None) -> Callable[[Any], Any]:
    """Takes the fastest of `configs` for each combination of the arguments in `key`, and remembers it on disk.

    The first call of each combination times them, and waits for the device: make it before a CUDA graph is captured.
    Interpreted, the first is taken. No key may be a number of rows or a length: they change from step to step.
    tuning: None: as the environment's TUNING says.
    """
    how = os.environ.get(TUNING, KEEP) if tuning is None else tuning
    few = candidates(configs, "0" if INTERPRETED else how)
    decorate: Callable[[Any], Any] = triton.autotune(configs=few, key=list(key), cache_results=how == KEEP)
    return decorate


def candidates(configs: Sequence[triton.Config], tuning: str) -> list[triton.Config]:
    """Those that are timed; one alone is not."""
    if tuning in (KEEP, FORGET):
        return list(configs)
    if not tuning.isdecimal():
        raise ValueError(f"{TUNING} is {tuning!r}: expected {KEEP}, {FORGET} or the number of a configuration.")
    return [configs[min(int(tuning), len(configs) - 1)]]


def padded(size: int, least: int = 1) -> int:
    """The next power of two, which tiles need."""
    return max(least, 1 << (size - 1).bit_length())


def warps(elements: int) -> int:
    """For a program that goes over so many elements once: eight of them a thread, 1 to 16 warps."""
    return min(max(padded(elements) // 256, 1), 16)
