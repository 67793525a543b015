"""Owns how memory is asked of the system: private, as it is first used, on large pages or on small ones.
Never says what lies in it."""

from __future__ import annotations

import mmap
from contextlib import suppress


def map_memory(size: int, *, large_pages: bool) -> mmap.mmap:
    """Map bytes of zero that the system provides as they are first read or written. They go back to it with the last
    that refers to them.

    large_pages: of 2 MiB, where the system has them. Else small ones, also where it would give large ones to everybody.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages would count as a file's
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages refuses the advice, and needs none
            memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return memory
