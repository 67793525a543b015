"""Owns launches whose programs start before the launch ahead has ended (programmatic dependent launch).
Never lets a kernel write before it has waited, or read what a launch on its stream may still write."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from kernels.triton.shared.launch import INTERPRETED

FIRST_CAPABILITY = 90


@cache
def overlaps() -> bool:
    """Return whether this process's GPU has such launches; the constant OVERLAPS of the kernels that have them."""
    if INTERPRETED:
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= FIRST_CAPABILITY)


def overlapping() -> dict[str, bool]:
    """Return the options of a launch of a kernel that calls `wait_for_previous`. Before that it may read weights alone,
    which no launch of a step writes."""
    return {"launch_pdl": True} if overlaps() else {}


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Let programs of the next launch start, then wait until all launches ahead have ended and their results are seen.

    The next launch's programs wait in turn if it is an overlapping one; any other starts only when this has ended.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
