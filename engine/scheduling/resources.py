"""Owns the contract of what a running request holds besides KV blocks: recurrent state, room in the encoder cache.
Never names one of them: the planner and the scheduler ask and tell all of them in one loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.multimodal_inputs import EncodeJob
from engine.scheduling.request import Request
from engine.step import RowInputs, ScheduledRequest, StateUse, StepPlan


@dataclass(slots=True)
class RowParts:
    """What resources put into a row; see ScheduledRequest."""

    state: StateUse | None = None
    inputs: RowInputs | None = None


@dataclass(slots=True)
class StepParts:
    """What resources put into a step; see StepPlan."""

    state_moves: tuple[tuple[int, int], ...] = ()
    dropped: tuple[bytes, ...] = ()
    encodes: tuple[EncodeJob, ...] = ()


class Allowance(Protocol):
    """What one plan may still take of a resource. Asking changes nothing but the allowance."""

    def reach(self, request: Request, start: int, end: int, gone: Iterable[str]) -> int:
        """How far a row from `start` may go: to `end`, or to where it would need more than there is. `start`: the row
        has to wait. gone: ids of requests that the plan preempts."""
        ...

    def take(self, request: Request, start: int, end: int) -> None:
        """The plan has a row [start, end), which `reach` allows."""
        ...

    def put_off(self, request: Request) -> None:
        """The request got no row, so that what it waits for is kept from those behind it."""
        ...

    def is_kept_from(self, request: Request) -> bool:
        """Whether a request with no row yet would take what one before it waits for."""
        ...


class Resource:
    """Something besides KV blocks that requests hold while they run. What a resource has no use for it leaves out.

    A plan asks `epoch`, `usable_prefix` and `allowance`, which change nothing. Executing it calls `admit` for every
    request that starts, then `take` for every row, then `finish` once. Each row's results end in `advance` or in
    `discard`, and a step that failed as a whole in `lose` before that. `release` gives everything back: when the
    request ends, in whatever way, and when it is preempted.

    LoRA adapters are none of these: a request holds its adapter from before it waits until its end (AdapterCache).
    """

    @property
    def epoch(self) -> int:
        """Changes whenever `usable_prefix` could answer differently."""
        return 0

    def usable_prefix(self, request: Request, num_blocks: int) -> int:
        """From how many of its first `num_blocks` blocks, which the prefix cache has, the request can start."""
        return num_blocks

    def allowance(self) -> Allowance | None:
        """For a new plan; None where every request with a seat has what it needs."""
        return None

    def admit(self, request: Request, num_prefix_blocks: int) -> None:
        """The request starts, after as many cached blocks."""

    def take(self, request: Request, start: int, end: int, parts: RowParts) -> None:
        """The step computes [start, end) of the request: add what its row has to say."""

    def finish(self, parts: StepParts) -> None:
        """The step has all its rows: add what it has to say besides."""

    def advance(self, request: Request, row: ScheduledRequest, end: int) -> None:
        """The row was computed, and positions below `end` are good; their full blocks are hashed."""

    def discard(self, row: ScheduledRequest) -> None:
        """The row's results are dropped: its request has ended or was preempted, or the row failed."""

    def lose(self, step: StepPlan) -> None:
        """The step failed, and nobody knows how far it got."""

    def release(self, request: Request) -> None:
        """The request, which runs, gives everything back."""
