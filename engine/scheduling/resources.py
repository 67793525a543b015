"""Owns the contract of what a running request holds besides KV blocks, such as recurrent state or room in the encoder
cache. Never names a single one: the planner and the scheduler call all of them in a loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.multimodal_inputs import EncodeJob
from engine.scheduling.request import Request
from engine.step import RowInputs, ScheduledRequest, StateUse, StepPlan


@dataclass(slots=True)
class RowParts:
    """The parts of a row that resources provide; see ScheduledRequest."""

    state: StateUse | None = None
    inputs: RowInputs | None = None


@dataclass(slots=True)
class StepParts:
    """The parts of a step that resources provide; see StepPlan."""

    state_moves: tuple[tuple[int, int], ...] = ()
    dropped: tuple[bytes, ...] = ()
    encodes: tuple[EncodeJob, ...] = ()


class Allowance(Protocol):
    """What one plan may still take of a resource. Its methods change only the allowance itself."""

    def reach(self, request: Request, start: int, end: int, gone: Iterable[str]) -> int:
        """Return how far a row from `start` may go: to `end`, or to where it would need more than is available. `start`
        means that the row has to wait. `gone` has the ids of requests that the plan preempts."""
        ...

    def take(self, request: Request, start: int, end: int) -> None:
        """Note that the plan has a row [start, end), which `reach` allowed."""
        ...

    def put_off(self, request: Request) -> None:
        """Note that the request got no row, so that requests behind it must not take what it waits for."""
        ...

    def is_kept_from(self, request: Request) -> bool:
        """Whether a request without a row yet would take what an earlier one waits for."""
        ...


class Resource:
    """Something besides KV blocks that requests hold while they run. A resource overrides only the methods it needs.

    A plan calls `epoch`, `usable_prefix` and `allowance`, which change nothing. Executing the plan calls `admit` for
    every request that starts, then `take` for every row, then `finish` once. For each row's results either `advance` or
    `discard` is called; if the step failed as a whole, `lose` is called before. `release` returns everything, when the
    request ends in any way and when it is preempted.

    LoRA adapters are not resources: a request holds its adapter from before it waits until its end (AdapterCache).
    """

    @property
    def epoch(self) -> int:
        """Changes whenever `usable_prefix` could return something else."""
        return 0

    def usable_prefix(self, request: Request, num_blocks: int) -> int:
        """Return how many of the request's first `num_blocks` blocks, all in the prefix cache, it can start from."""
        return num_blocks

    def allowance(self) -> Allowance | None:
        """Make the allowance of a new plan; None if every request with a seat always has what it needs."""
        return None

    def admit(self, request: Request, num_prefix_blocks: int) -> None:
        """The request starts after this many cached blocks."""

    def take(self, request: Request, start: int, end: int, parts: RowParts) -> None:
        """The step computes [start, end) of the request: add the resource's parts of the row."""

    def finish(self, parts: StepParts) -> None:
        """The step has all its rows: add the resource's parts of the step."""

    def advance(self, request: Request, row: ScheduledRequest, end: int) -> None:
        """The row was computed, and positions below `end` are valid; their full blocks are hashed."""

    def discard(self, row: ScheduledRequest) -> None:
        """The row's results are dropped: its request has ended or was preempted, or the row failed."""

    def lose(self, step: StepPlan) -> None:
        """The step failed at an unknown point."""

    def release(self, request: Request) -> None:
        """The running request releases everything."""
