"""Owns how many threads can compute at a time in this process: its cores, and a container's CPU quota.
Never loads anything: it asks the system."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Return how many of the machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_threads(root: Path = Path("/")) -> tuple[int, str]:
    """Return how many threads can compute here at a time, and why. More threads than a container's CPU quota would be
    paused in the middle of every parallel region. root: where the system's files are, for tests."""
    cores, quota = usable_cores(), _cpu_quota(root)
    if quota is not None and quota < cores:
        return max(1, int(quota)), f"the container's CPU quota is {quota:g} of {cores} cores"
    return cores, f"this process may use {cores} cores"


def refused_threads(num_threads: int) -> str | None:
    """Say why an engine here cannot have so many threads; None if it can. A container's quota is no limit: it is for
    0.1 s at a time, in which a short step may use more threads than it has cores."""
    cores = usable_cores()
    if num_threads <= cores:
        return None
    return f"num_threads is {num_threads}: expected at most {cores}, the cores that this process may use"


def _cpu_quota(root: Path) -> float | None:
    """Return how many cores the container may use, by cgroup v2, or None if it has no limit."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
