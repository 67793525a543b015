"""Owns the engine-internal splitter (`chunk_owner: engine`): it computes one prompt in several forwards inside one
step, for offline use and for comparisons. Never decides where to cut: the plan does."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from engine.protocol import TokenLogprobs
from engine.step import Executor, PromptScoring, RowKind, ScheduledRequest, StepOutput, StepPlan


def collect_in_chunks(executor: Executor, step: StepPlan, cuts: tuple[int, ...]) -> StepOutput:
    """Run the only row of `step` chunk by chunk. Returns the last chunk's output with the scores and pooled states of
    all chunks."""
    (row,) = step.rows
    scores: list[TokenLogprobs] = []
    pooled: tuple[float, ...] = ()
    output: StepOutput | None = None
    for chunk in _chunks(row, cuts):
        executor.launch(replace(step, rows=(chunk,)))
        output = executor.collect()
        scores += output.prompt_logprobs.get(0, ())
        if (part := output.pooled.get(0)) is not None:
            pooled = tuple(map(operator.add, pooled, part)) if pooled else part
        if output.failed:
            break
    assert output is not None
    return replace(
        output,
        prompt_logprobs={0: tuple(scores)} if scores else {},
        pooled={0: pooled} if pooled else {},
    )


def _chunks(row: ScheduledRequest, cuts: tuple[int, ...]) -> Iterator[ScheduledRequest]:
    for start, end in pairwise((row.start, *cuts, row.end)):
        last = end == row.end
        yield row._replace(
            kind=row.kind if last else RowKind.MIDDLE,
            start=start,
            token_ids=row.token_ids[start - row.start : end - row.start],
            sampling=row.sampling if last else None,
            scoring=_scored_between(row.scoring, start, end),
            pool_from=_pooled_between(row.pool_from, start, end),
        )


def _scored_between(scoring: PromptScoring | None, start: int, end: int) -> PromptScoring | None:
    """The part of a row's scoring whose predicting positions lie in [start, end)."""
    if scoring is None:
        return None
    first = max(scoring.first, start)
    tokens = scoring.token_ids[first - scoring.first : max(end - scoring.first, 0)]
    return replace(scoring, first=first, token_ids=tokens) if tokens else None


def _pooled_between(pool_from: int | None, start: int, end: int) -> int | None:
    return None if pool_from is None or pool_from >= end else max(pool_from, start)
