"""Reads what a recording core executed: rows by kind, chunks by request, steps by number.
Never runs anything; a step that the engine cut into several launches has one plan for each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from engine.step import RowKind, ScheduledRequest, StepPlan
from tests.support.engines import RecordingCore


def kinds(plan: StepPlan) -> str:
    """Return `d` for each decode row, and `p` for each chunk."""
    return "".join("d" if row.kind is RowKind.DECODE else "p" for row in plan.rows)


def prefill_rows(plans: Iterable[StepPlan]) -> list[ScheduledRequest]:
    return [row for plan in plans for row in plan.rows if row.kind is not RowKind.DECODE]


def num_prefill_tokens(plan: StepPlan) -> int:
    return sum(len(row.token_ids) for row in prefill_rows([plan]))


def rows_of(core: RecordingCore, request_id: str) -> list[ScheduledRequest]:
    return [row for plan in core.plans for row in plan.rows if row.request_id == request_id]


def chunks(plan: StepPlan) -> list[tuple[str, int]]:
    """Return the request and the length of each chunk."""
    return [(row.request_id, len(row.token_ids)) for row in prefill_rows([plan])]


def chunks_of(core: RecordingCore, request_id: str) -> list[int]:
    return [len(row.token_ids) for row in prefill_rows(core.plans) if row.request_id == request_id]


def steps_of(core: RecordingCore, request_id: str) -> list[int]:
    """Return the numbers of the steps in which a request has a chunk."""
    return sorted({p.step_id for p in core.plans for row in prefill_rows([p]) if row.request_id == request_id})


def launches(core: RecordingCore) -> list[list[StepPlan]]:
    """Return the plans that the executor saw, by step."""
    return [list(plans) for _, plans in groupby(core.plans, key=lambda plan: plan.step_id)]
