"""Owns the description of what a benchmark ran on: the commit and the CPU.
Never measures anything and needs no torch, so that every benchmark can name its machine the same way."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"commit": _commit(), "cpu": f"{len(names)} x {names[0] if names else platform.processor()}"}


def _commit() -> str:
    """Empty where there is no checkout, or no git to ask."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
