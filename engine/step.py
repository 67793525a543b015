"""Owns the seam between scheduling and execution: what one step computes, and what it returns.
Never holds a tensor or a reference to a live request: a plan is a frozen picture that later mutation cannot change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class RowKind(Enum):
    """What a row is, said explicitly: a last chunk of one token is not a decode, though both have length 1."""

    MIDDLE = "middle"
    """A chunk that leaves part of the prompt to compute: no logits, no sampling."""
    LAST = "last"
    """The chunk that completes the prompt: samples the first token."""
    DECODE = "decode"
    """Feeds the newest token and samples the next."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to choose the token at `position`. The random number depends on (seed, position) and nothing else."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    """Index, in prompt + answer, of the token to be sampled."""
    banned_token_ids: tuple[int, ...] = ()
    """Never sampled in this step (stop tokens before `min_tokens`)."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A row of the step: compute positions [start, start + len(token_ids)) of one request.

    0 ........ start ................. end          end = start + len(token_ids)
    | KV present | token_ids, KV written |
    | block_ids: ceil(end / block_size) or more |
    """

    request_id: str
    kind: RowKind
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sampling: RowSampling | None
    """None exactly when kind is MIDDLE."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: decode rows first, then prefill chunks, each in arrival order."""

    step_id: int
    rows: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step returns: `sampled[i]` are row i's new tokens, empty for a MIDDLE row and for one that failed."""

    step_id: int
    sampled: tuple[tuple[int, ...], ...]
    failed: tuple[tuple[int, str], ...] = ()
    """(row, why) of rows that failed alone, in row order; the others are good."""


class ExecutorFatalError(Exception):
    """Raised by an executor that can run no further step; the engine fails what is live and turns unhealthy."""


class ExecutorOutOfMemoryError(Exception):
    """Raised by an executor that lacked memory for a step's activations; a smaller step may succeed."""


class Executor(Protocol):
    """Runs steps in order. `launch` may return before the work is done; `collect` waits for the oldest launched step.

    An ordinary exception from either fails the rows of that plan only; after ExecutorOutOfMemoryError a step with
    prefill is tried once more with half of it; ExecutorFatalError ends the engine.
    """

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepOutput: ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests are gone: drop whatever is kept for them. Their blocks may be reused by the next plan."""

    def shutdown(self) -> None: ...
