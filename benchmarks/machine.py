"""Owns the description of the machine that a benchmark ran on: the commit and the CPU.
Never measures anything and needs no torch, so that every benchmark can name its machine the same way."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path


def machine() -> dict[str, str]:
    """Describe the commit and the machine that figures were measured with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"commit": _commit(), "cpu": f"{len(names)} x {names[0] if names else platform.processor()}"}


def _commit() -> str:
    """Return the commit; empty without a checkout or without git."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
