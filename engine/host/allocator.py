"""Owns what the C library's allocator is asked to do with freed memory: keep it between steps, or give it back.
Never allocates, and does nothing where the C library is not glibc."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def keep_freed_memory() -> None:
    """Ask glibc to keep large freed buffers: each layer frees and allocates the same few megabytes again.

    Handing them back costs a page fault per 4 KiB and layer; 16 streams of 1,000 tokens spent a third of their step on
    that (1,147 faults and 206 ms a step against 2 and 140, two busy virtual cores).
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def give_back_freed_memory() -> None:
    """Ask glibc to hand back what loading has freed, in any thread's arena: no step allocates as much again.

    Without that, what one thread allocates and another frees stays with the first one's arena, where no other can use
    it: a mixture of 1.2 GB in FP8, packed by two threads, took 3.0 GB at its most, and 1.4 GB afterwards.
    """
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None: other libraries lack it."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    return found
