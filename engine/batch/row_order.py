"""Owns which positions of a step are sampled, and how far a row's drafts turn out to be right.
Never chooses a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from engine.step import RowKind, ScheduledRequest, StepOutput, StepPlan


class Place(NamedTuple):
    """The token `offset` of row `number`, after which one is sampled."""

    number: int
    offset: int


def sampled_places(rows: Sequence[ScheduledRequest]) -> list[Place]:
    """Row by row: all tokens of a decode row, of which all but the first are drafts, and the last token of a chunk."""
    places = []
    for number, row in enumerate(rows):
        if row.sampling is not None:
            first = 0 if row.kind is RowKind.DECODE else len(row.token_ids) - 1
            places += [Place(number, offset) for offset in range(first, len(row.token_ids))]
    return places


def num_accepted(drafts: Sequence[int], sampled: Sequence[int | None]) -> int:
    """How many of the sampled tokens count: up to the first that is not what was drafted for it."""
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    return count + 1


def in_kernel_order(plan: StepPlan) -> tuple[StepPlan, list[int] | None]:
    """Decode rows of one token, then those with drafts, then chunks: attention takes the first as one batch.

    Also which row of `plan` each row is; None if they are in that order already.
    """
    ranks = [_rank(row) for row in plan.rows]
    if all(before <= after for before, after in pairwise(ranks)):
        return plan, None
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return replace(plan, rows=tuple(plan.rows[number] for number in order)), order


def _rank(row: ScheduledRequest) -> int:
    return 2 if row.kind is not RowKind.DECODE else int(len(row.token_ids) > 1)


def in_plan_order(output: StepOutput, order: Sequence[int]) -> StepOutput:
    """What `in_kernel_order` has put elsewhere, back where the plan has it."""
    sampled: list[tuple[int, ...]] = [()] * len(order)
    for number, tokens in zip(order, output.sampled, strict=True):
        sampled[number] = tokens
    return replace(
        output,
        sampled=tuple(sampled),
        failed=tuple(sorted((order[number], why) for number, why in output.failed)),
        logprobs={order[number]: found for number, found in output.logprobs.items()},
        prompt_logprobs={order[number]: found for number, found in output.prompt_logprobs.items()},
        pooled={order[number]: found for number, found in output.pooled.items()},
        drafts={order[number]: found for number, found in output.drafts.items()},
    )
