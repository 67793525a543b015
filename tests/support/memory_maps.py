"""Owns what Linux says of the mapping that an address of this process is in.
Never takes memory for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)
"""For tests of what a mapping's flags say of them."""


def mapping_flags(address: int) -> list[str] | None:
    """Return the kernel's flags of the mapping, as proc(5) lists them under VmFlags; None: the address is not
    mapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return None
