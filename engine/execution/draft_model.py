"""Owns a second, smaller model that drafts tokens: it reads the text that rows name, and continues it greedily.
Never decides what to read or how many tokens to draft, and never whether a draft is accepted: the main model does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.batch.row_order import in_kernel_order
from engine.models.computed import Model
from engine.step import DRAFT_TOKEN, DraftContext, RowKind, RowSampling, ScheduledRequest, StepPlan

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class DraftModel:
    """A model beside the main one. Its KV cache has as many blocks: what it reads of a row lies in the row's own
    blocks.

    It always proposes its most likely token, however the row samples. A row that samples accepts such a token with the
    probability that the main model gives it, since a draft is accepted if it is what would have been sampled.
    """

    def __init__(self, model: Model) -> None:
        assert model.state is None, "a recurrent state cannot be taken back to before a rejected draft"
        self.model = model

    def fill(self, plan: StepPlan) -> StepPlan:
        """Replace every DRAFT_TOKEN of the plan. Takes one forward pass, which reads and drafts the first tokens, and
        one more for each further token of the longest draft.

        Raises:
            ValueError: a row needs drafts, but its text is not read up to its newest token.
        """
        counts = [row.token_ids.count(DRAFT_TOKEN) for row in plan.rows]
        for row, count in zip(plan.rows, counts, strict=True):
            if count and (row.draft_context is None or row.draft_context.end != row.start + 1):
                raise ValueError(f"Row {row.request_id}: drafts of a text that is read to {row.draft_context}.")
        contexts = {number: row.draft_context for number, row in enumerate(plan.rows) if row.draft_context is not None}
        if not contexts:
            return plan
        rows = [_reads(plan.rows[number], context, counts[number] > 0) for number, context in contexts.items()]
        proposed = dict(zip(contexts, self._pass(plan.step_id, rows), strict=True))
        drafts = {number: [token] for number, token in proposed.items() if token is not None}
        for length in range(1, max(counts)):
            going_on = [number for number in drafts if counts[number] > length]
            rows = [_goes_on(plan.rows[number], length, drafts[number][-1]) for number in going_on]
            for number, token in zip(going_on, self._pass(plan.step_id, rows), strict=True):
                assert token is not None
                drafts[number].append(token)
        return replace(plan, rows=tuple(_filled(row, drafts.get(i, ())) for i, row in enumerate(plan.rows)))

    def _pass(self, step_id: int, rows: Sequence[ScheduledRequest]) -> list[int | None]:
        """The most likely token after each row; None for a row that samples nothing."""
        plan, order = in_kernel_order(StepPlan(step_id, tuple(rows)))
        computed = self.model.forward(plan, {})
        best = computed.logits.argmax(dim=-1) if computed.best is None else computed.best[0]
        tokens = iter(best.tolist())
        found = [next(tokens) if row.sampling is not None else None for row in plan.rows]
        if order is None:
            return found
        back: list[int | None] = [None] * len(order)
        for number, token in zip(order, found, strict=True):
            back[number] = token
        return back


def _reads(row: ScheduledRequest, context: DraftContext, drafted: bool) -> ScheduledRequest:
    """The draft model's row that reads `context`: the end of a prompt if tokens are drafted after it, else a part of
    one."""
    kind = RowKind.MIDDLE if not drafted else RowKind.LAST if len(context.token_ids) > 1 else RowKind.DECODE
    sampling = GREEDY if drafted else None
    return ScheduledRequest(row.request_id, kind, context.start, context.token_ids, row.block_ids, sampling)


def _goes_on(row: ScheduledRequest, length: int, token: int) -> ScheduledRequest:
    """The draft model's row after `length` proposed tokens, the last of which is `token`."""
    return ScheduledRequest(row.request_id, RowKind.DECODE, row.start + length, (token,), row.block_ids, GREEDY)


def _filled(row: ScheduledRequest, drafts: Sequence[int]) -> ScheduledRequest:
    return row._replace(token_ids=(row.token_ids[0], *drafts)) if drafts else row
