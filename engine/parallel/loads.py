"""Owns the load of several engines as that of one.
Never weighs one against another: whoever chooses between them looks at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.protocol import LoadSnapshot

_SUMMED = (
    "num_running",
    "num_waiting",
    "num_preparing",
    "num_waiting_preempted",
    "num_queued_tokens",
    "num_blocks",
    "num_held_blocks",
    "num_evictable_blocks",
    "num_reserved_blocks",
    "num_preemptions",
    "num_loading",
)


def with_unseen(load: LoadSnapshot, num_given: int) -> LoadSnapshot:
    """Return the load of an engine that was given so many requests that have not ended: it has not yet said of all of
    them that they wait."""
    unseen = max(0, num_given - load.num_running - load.num_waiting)
    return replace(load, num_waiting=load.num_waiting + unseen)


def summed(loads: Sequence[LoadSnapshot]) -> LoadSnapshot:
    """Return the sums of what is counted. Steps are those of the first, since ranks make them together; so is what
    describes how it reserves memory. It waits for the reason of the first in which a request waits."""
    first = loads[0]
    sums = {name: sum(getattr(load, name) for load in loads) for name in _SUMMED}
    reason = next((load.wait_reason for load in loads if load.wait_reason is not None), None)
    return replace(first, wait_reason=reason, num_steps=max(load.num_steps for load in loads), **sums)
