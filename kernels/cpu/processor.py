"""Owns the list of features that this machine's processor reports.
Never judges which of them matter."""

from __future__ import annotations

from pathlib import Path


def cpu_flags() -> frozenset[str]:
    """Return the instruction set extensions as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
