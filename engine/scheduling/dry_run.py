"""Owns the shape of a step that is planned and not yet committed: what ranks in lockstep exchange before they run it.
Never changes anything: a plan is a proposal, and looking at it commits to nothing."""

from __future__ import annotations

from itertools import pairwise

from engine.lockstep.shape import NO_STEP, StepShape
from engine.scheduling.planner import Plan
from engine.step import RowKind


def shape_of(plan: Plan, *, draft_passes: int = 0, draft_tokens: int = 0) -> StepShape:
    """Return the shape of the step that committing this plan would launch. The draft model's part is not in the plan:
    see `DraftModelPolicy.passes_for`."""
    if not plan.rows:
        return NO_STEP
    mixed = any(row.kind is not RowKind.DECODE or row.num_tokens != 1 for row in plan.rows)
    if not (cuts := plan.rows[0].cuts):
        return StepShape(1, sum(row.num_tokens for row in plan.rows), int(mixed), draft_passes, draft_tokens)
    (row,) = plan.rows
    ends = (row.start, *cuts, row.start + row.num_tokens)
    return StepShape(len(cuts) + 1, max(end - start for start, end in pairwise(ends)), 1)
