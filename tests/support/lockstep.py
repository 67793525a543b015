"""Owns a fake executor whose ranks exchange experts, and the log of these exchanges, by which ranks are compared.
Never lets a rank know what another computes: it answers like the fake executor inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from zlib import crc32

from engine.lockstep.ranks import RankGoneError
from engine.lockstep.shape import NO_STEP, StepShape
from engine.lockstep.threads import make_thread_ranks
from engine.step import (
    DRAFT_TOKEN,
    Capabilities,
    Executor,
    ExecutorFatalError,
    RowKind,
    StepOutput,
    StepPlan,
)

LAYERS = 2


class Exchange(NamedTuple):
    """A collective that every rank has to make at the same place in the same order."""

    of: str
    tokens: int
    """The rows of its buffers, which must be the same on all ranks."""


class Wire(Protocol):
    """What exchanges go through."""

    def exchange(self, rank: int, made: Exchange) -> None: ...

    def close(self, rank: int) -> None:
        """Let the exchanges fail that this rank has not made."""


@dataclass(slots=True, eq=False)
class Log:
    """Keeps the exchanges of each rank, without waiting for those of the others."""

    made: list[list[Exchange]]

    def exchange(self, rank: int, made: Exchange) -> None:
        self.made[rank].append(made)

    def close(self, rank: int) -> None: ...

    def check(self, joint: StepShape) -> None:
        """Check that all ranks made the exchanges of this step, and begin the next."""
        expected = joint.forwards * _exchanges_of(joint)
        for rank, made in enumerate(self.made):
            assert made == expected, f"rank {rank} made {made} in a step of {joint}"
            made.clear()


class Meetings:
    """Lets every exchange wait for those of the others, as on devices, and counts them by rank."""

    def __init__(self, size: int) -> None:
        self._ends = make_thread_ranks(size)
        self.made: list[list[Exchange]] = [[] for _ in range(size)]

    def exchange(self, rank: int, made: Exchange) -> None:
        self.made[rank].append(made)
        digest = crc32(repr(made).encode())
        try:
            most, least = self._ends[rank].reduce_max((digest, -digest))
        except RankGoneError as error:
            raise ExecutorFatalError(str(error)) from error
        if most != -least:
            raise ExecutorFatalError(f"rank {rank} makes {made}, and another rank makes something else")

    def close(self, rank: int) -> None:
        self._ends[rank].leave("its executor was shut down")


def _exchanges_of(joint: StepShape) -> list[Exchange]:
    """Return the exchanges of one forward pass."""
    drafts = [Exchange("draft", joint.draft_tokens)] * joint.draft_passes
    return [*drafts, *[Exchange("mixed" if joint.mixed else "decode", joint.tokens)] * LAYERS]


class ExpertsExecutor:
    """Runs plans on `executor`, and makes the exchanges of their joint shape around them: also if a row or the step
    fails between them, as it does in the middle of a real forward pass."""

    def __init__(self, executor: Executor, rank: int, wire: Wire) -> None:
        self._executor = executor
        self._rank = rank
        self._wire = wire
        self.issued = NO_STEP
        """The shape of the rows that were launched since this was set, counted from the rows alone."""
        self.num_padded = 0
        self.has_failed = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._executor.capabilities, lockstep=True)

    def launch(self, plan: StepPlan) -> None:
        joint, failure = plan.joint, None
        assert joint is not None
        for _ in range(joint.draft_passes):
            self._wire.exchange(self._rank, Exchange("draft", joint.draft_tokens))
        self.num_padded += not plan.rows
        if plan.rows:
            self.issued = _together(self.issued, _shape_of(plan))
            try:
                self._executor.launch(replace(plan, joint=None))
            except ExecutorFatalError:
                raise
            except Exception as error:  # noqa: BLE001  raised below
                failure, self.has_failed = error, True
        for made in _exchanges_of(joint)[joint.draft_passes :]:
            self._wire.exchange(self._rank, made)
        if failure is not None:
            raise failure

    def collect(self) -> StepOutput:
        output = self._executor.collect()
        self.has_failed |= bool(output.failed)
        return output

    def forget(self, request_ids: Sequence[str]) -> None:
        self._executor.forget(request_ids)

    def shutdown(self) -> None:
        self._wire.close(self._rank)
        self._executor.shutdown()


def _shape_of(plan: StepPlan) -> StepShape:
    """Count a launched forward pass by what its rows hold."""
    mixed = any(row.kind is not RowKind.DECODE or len(row.token_ids) > 1 for row in plan.rows)
    read = [len(row.draft_context.token_ids) for row in plan.rows if row.draft_context is not None]
    drafted = max(row.token_ids.count(DRAFT_TOKEN) for row in plan.rows)
    return StepShape(1, plan.num_tokens, int(mixed), max(drafted, int(bool(read))), sum(read))


def _together(before: StepShape, launched: StepShape) -> StepShape:
    """Add a forward pass to those before it in a step."""
    largest = StepShape(*map(max, before, launched))
    return largest._replace(forwards=before.forwards + launched.forwards)
