"""Owns the judgement of which workers of a load are lost: those that fall silent, and those that never say a word.
Never waits for a worker, and never ends a run: the Locust file does."""

from __future__ import annotations

from collections.abc import Container, Mapping

_SILENT_S = 10.0
"""A worker that has been silent for so long counts as lost."""
_BEGIN_S = 60.0
"""A worker may take so long to say its first word."""


def lost_workers(
    heard: Mapping[str, float], done: Container[str], expected: int, began: float, now: float
) -> list[str]:
    """Return what is missing, in a line each. `heard`: when each worker was last heard of. `done`: those that have
    ended. `expected`: how many there are. `began`: when the load did."""
    lost = [f"worker {name} was lost" for name, at in heard.items() if name not in done and now - at > _SILENT_S]
    if len(heard) < expected and now - began > _BEGIN_S:
        lost.append(f"only {len(heard)} of {expected} workers began" if heard else "no worker began")
    return lost
