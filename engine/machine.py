"""Owns the description of what a benchmark ran on: the commit and the CPU.
Never measures anything and needs no torch, so that every benchmark can name its machine the same way."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"commit": commit.stdout.strip(), "cpu": f"{len(names)} x {names[0] if names else platform.processor()}"}
