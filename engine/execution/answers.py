"""Owns what an executor keeps of each answer from step to step: its newest token, and its grammar's progress.
Never runs a model, and never holds more than one token of an answer: plans bring the rest."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.batch.grammar import Grammars
from engine.batch.inputs import is_lost
from engine.batch.logit_controls import Within, bans_all
from engine.batch.row_order import NO_LOGIT, SamplePosition
from engine.protocol import NOTHING_LEFT, ErrorCode
from engine.step import (
    GrammarRow,
    RowFailure,
    RowKind,
    RowSampling,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    answer_tokens,
    grammar_rows,
)

LOST_TOKEN = RowFailure("The token to go on from was not sampled: its row failed in the step before.")
NO_TOKEN_LEFT = RowFailure(NOTHING_LEFT, ErrorCode.INVALID_PARAMETER)

_Masks = tuple[Within | None, Mapping[int, RowFailure]]
"""(the tokens that grammars allow, by row the failure of rows that have no mask)"""
_NO_MASKS: Future[_Masks] = Future()
"""The masks of a step without grammars."""
_NO_MASKS.set_result((None, MappingProxyType({})))


class Sampled(NamedTuple):
    """How to sample the token after each place; see engine.batch.sampler.sample."""

    rows: list[RowSampling]
    positions: list[int]
    """The positions of the sampled tokens."""
    answers: list[tuple[int, ...]]
    """The answer's tokens before each sampled one; () if no control looks back. PENDING_TOKEN for one in flight."""


class Answers:
    """The answers of the requests that an executor has seen and not forgotten. One thread runs the steps."""

    def __init__(self, grammars: Grammars | None) -> None:
        """grammars: None if the model's directory has no tokenizer, or no token that ends an answer."""
        self.grammars = grammars
        self.newest: dict[str, int] = {}
        """Request id -> the token it sampled last. PENDING_TOKEN in the next step stands for it."""
        self._waited_s = 0.0  # for masks, since the last step that was kept
        self._masker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-masks")

    # --- before a step's tokens are chosen ----------------------------------------------------------------------------

    @contextmanager
    def masks(self, plan: StepPlan, places: Sequence[SamplePosition]) -> Iterator[Future[_Masks]]:
        """Compute the grammars' masks at `places` on another thread while the body runs; the result is there at its
        end."""
        rows = grammar_rows(plan, self.newest)
        if not rows:
            yield _NO_MASKS
            return
        assert self.grammars is not None
        found = self._masker.submit(_fill_masks, self.grammars, rows, places)
        try:
            yield found
        finally:
            begun = time.perf_counter()
            wait([found])  # until then that thread has the matchers to itself
            self._waited_s += time.perf_counter() - begun

    def sampled(self, plan: StepPlan, places: Sequence[SamplePosition], flying: Container[str] = ()) -> Sampled:
        """How to sample at `places`. flying: the requests whose newest token the host has not read."""
        rows = [plan.rows[place.number] for place in places]
        return Sampled(
            [row.sampling for row in rows if row.sampling is not None],
            [row.start + place.offset + 1 for row, place in zip(rows, places, strict=True)],
            [self._up_to(row, place.offset, flying) for row, place in zip(rows, places, strict=True)],
        )

    def _up_to(self, row: ScheduledRequest, offset: int, flying: Container[str]) -> tuple[int, ...]:
        """The answer's tokens up to and including token `offset` of the row; () if no control looks back."""
        answer = row.answer if row.request_id in flying else answer_tokens(row, self.newest)
        return (*answer, *row.token_ids[1 : offset + 1]) if answer and row.kind is RowKind.DECODE else answer

    # --- once they are ------------------------------------------------------------------------------------------------

    def lost(self, plan: StepPlan) -> dict[int, RowFailure]:
        """Failures of rows that continue from a token which was never sampled. Call this before `keep`."""
        return {number: LOST_TOKEN for number, row in enumerate(plan.rows) if is_lost(row, self.newest)}

    def no_token(self, row: ScheduledRequest, offset: int) -> RowFailure:
        """Say why nothing could be sampled after token `offset` of a decode row, or after a chunk. Call this before
        `keep`."""
        left = row.sampling is None or not bans_all(row.sampling, self._up_to(row, offset, ()))
        return NO_LOGIT if left else NO_TOKEN_LEFT

    def keep(self, plan: StepPlan, output: StepOutput, *, limited: bool, forgotten: Container[str] = ()) -> StepOutput:
        """Note the newest tokens, and add the tokens that grammars force to follow. limited: whether grammars limit any
        row. forgotten: requests that were forgotten since the step was launched. One with the same id may run by now.

        For a failed row nothing is noted, so that the next step cannot continue from an older token.
        """
        if limited:
            begun = time.perf_counter()
            drafts = self._forced(plan, output, forgotten)
            waited_s, self._waited_s = self._waited_s + time.perf_counter() - begun, 0.0
            output = replace(output, drafts=drafts, grammar_s=waited_s)
        failed = {number for number, _ in output.failed}
        for number, (row, tokens) in enumerate(zip(plan.rows, output.sampled, strict=True)):
            if row.request_id in forgotten:
                continue
            if tokens:
                self.newest[row.request_id] = tokens[-1]
            elif number in failed:
                self.newest.pop(row.request_id, None)
        return output

    def _forced(self, plan: StepPlan, output: StepOutput, forgotten: Container[str]) -> dict[int, tuple[int, ...]]:
        assert self.grammars is not None
        return {
            number: forced
            for number, row in grammar_rows(plan, self.newest)
            if row.request_id not in forgotten
            and output.sampled[number]
            and (forced := self.grammars.forced(row.request_id, output.sampled[number]))
        }

    # --- requests that are gone ---------------------------------------------------------------------------------------

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.newest.pop(request_id, None)
            if self.grammars is not None:
                self.grammars.forget(request_id)

    def shutdown(self) -> None:
        self.newest.clear()
        self._masker.shutdown()


def _fill_masks(grammars: Grammars, rows: Sequence[tuple[int, GrammarRow]], places: Sequence[SamplePosition]) -> _Masks:
    words, failed = grammars.masks([row for _, row in rows])
    numbers = {number for number, _ in rows}
    limited = torch.tensor([i for i, place in enumerate(places) if place.number in numbers])
    return Within(limited, torch.from_numpy(words)), {rows[i][0]: why for i, why in failed.items()}
