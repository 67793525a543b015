"""Owns which positions of a step are sampled, and what each row returns: its tokens, up to the first wrong draft.
Never chooses a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.protocol import TokenLogprobs
from engine.step import RowFailure, RowKind, ScheduledRequest, StepOutput, StepPlan

NO_LOGIT = RowFailure("The model gave no finite logit.")
NO_STATE = RowFailure("The model gave no finite hidden state.")


class SamplePosition(NamedTuple):
    """Token `offset` of row `number`: a token is sampled after it."""

    number: int
    offset: int


def sampled_positions(rows: Sequence[ScheduledRequest]) -> list[SamplePosition]:
    """Return all tokens of a decode row (all but the first are drafts) and the last token of a chunk, row by row."""
    positions = []
    for number, row in enumerate(rows):
        if row.sampling is not None:
            first = 0 if row.kind is RowKind.DECODE else len(row.token_ids) - 1
            positions += [SamplePosition(number, offset) for offset in range(first, len(row.token_ids))]
    return positions


def num_accepted(drafts: Sequence[int], sampled: Sequence[int | None]) -> int:
    """Count the sampled tokens that are kept: those up to and including the first that differs from its draft."""
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count]:
        count += 1
    return count + 1


def in_kernel_order(plan: StepPlan) -> tuple[StepPlan, list[int] | None]:
    """Sort rows: decode rows of one token, then decode rows with drafts, then chunks. Attention takes the first group
    as one batch.

    Also returns each row's index in `plan`, or None if the rows were in that order already.
    """
    ranks = [_rank(row) for row in plan.rows]
    if all(before <= after for before, after in pairwise(ranks)):
        return plan, None
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return replace(plan, rows=tuple(plan.rows[number] for number in order)), order


def _rank(row: ScheduledRequest) -> int:
    return 2 if row.kind is not RowKind.DECODE else int(len(row.token_ids) > 1)


def in_plan_order(output: StepOutput, order: Sequence[int]) -> StepOutput:
    """Undo `in_kernel_order`: put the results back into the order of the plan's rows."""
    sampled: list[tuple[int, ...]] = [()] * len(order)
    for number, tokens in zip(order, output.sampled, strict=True):
        sampled[number] = tokens
    return replace(
        output,
        sampled=tuple(sampled),
        failed=tuple(sorted((order[number], why) for number, why in output.failed)),
        logprobs={order[number]: values for number, values in output.logprobs.items()},
        prompt_logprobs={order[number]: values for number, values in output.prompt_logprobs.items()},
        pooled={order[number]: values for number, values in output.pooled.items()},
        drafts={order[number]: values for number, values in output.drafts.items()},
    )


def sum_pooled(plan: StepPlan, hidden: Tensor) -> Tensor | None:
    """Sum the hidden states of pooled rows, on their device. hidden: [num_tokens, hidden]; # [pooled rows, hidden]"""
    sums = []
    begin = 0  # the row's first token within the step
    for row in plan.rows:
        if row.pool_from is not None:
            sums.append(hidden[begin + row.pool_from - row.start : begin + len(row.token_ids)].float().sum(dim=0))
        begin += len(row.token_ids)
    return torch.stack(sums) if sums else None


def pooled_by_row(plan: StepPlan, sums: Tensor | None) -> tuple[dict[int, tuple[float, ...]], dict[int, RowFailure]]:
    """Return the sums of `sum_pooled`, now on the host, by row, and the failures of rows whose sum is not finite."""
    if sums is None:
        return {}, {}
    numbers = [number for number, row in enumerate(plan.rows) if row.pool_from is not None]
    pooled = dict(zip(numbers, map(tuple, sums.tolist()), strict=True))
    return pooled, {number: NO_STATE for number, vector in pooled.items() if not all(map(math.isfinite, vector))}


def make_output(
    plan: StepPlan,
    tokens: Mapping[int, Sequence[int | None]],
    logprobs: Mapping[int, Sequence[TokenLogprobs | None]],
    scores: Mapping[int, tuple[TokenLogprobs, ...] | None],
    pooled: Mapping[int, tuple[float, ...]],
    failed: dict[int, RowFailure],
    no_token: Callable[[ScheduledRequest, int], RowFailure],
) -> StepOutput:
    """Make the step's output: what each row asked for, up to its first wrong draft. A row that lacks any of it, or is
    in `failed`, returns only its pooled states. no_token: says why there is no token after a decode row's token at this
    offset, or after a chunk."""
    sampled: dict[int, tuple[int, ...]] = {}
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    failed = {number: NO_LOGIT for number, row_scores in scores.items() if row_scores is None} | failed
    for number, row_tokens in tokens.items():
        row = plan.rows[number]
        count = num_accepted(row.token_ids[1:], row_tokens) if row.kind is RowKind.DECODE else 1
        sampled[number] = tuple(token for token in row_tokens[:count] if token is not None)
        scored[number] = tuple(logprob for logprob in logprobs.get(number, ())[:count] if logprob is not None)
        if len(sampled[number]) < count:
            failed.setdefault(number, no_token(row, len(sampled[number])))
        elif number in logprobs and len(scored[number]) < count:
            failed.setdefault(number, NO_LOGIT)
    return StepOutput(
        plan.step_id,
        sampled=tuple(sampled.get(number, ()) if number not in failed else () for number in range(len(plan.rows))),
        failed=tuple(sorted(failed.items())),
        logprobs={
            number: row_logprobs for number, row_logprobs in scored.items() if row_logprobs and number not in failed
        },
        prompt_logprobs={
            number: row_scores
            for number, row_scores in scores.items()
            if row_scores is not None and number not in failed
        },
        pooled=pooled,
    )
