"""Owns the effect of a step's results on requests, and the events that follow: tokens, log-probabilities, the terminal
event. Never plans or runs a step. A row's results reach it once, and only while they still belong to the row's
request."""

from __future__ import annotations

from engine.observer import Verified
from engine.protocol import (
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Token,
    TokenLogprobs,
)
from engine.scheduling.planner import PlannedRow
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stopping import is_complete, is_stop_token
from engine.speculation.draft_model_policy import DraftModelPolicy
from engine.speculation.speculation import Speculation
from engine.step import Executor, RowKind, ScheduledRequest, StepOutput

LEAST_FORCED, LEAST_FORCED_ALONE = 4, 2
"""With overlap, a row stands aside for drafts if a grammar forces so many tokens, of which the first is in flight: the
others are more than the two steps in which it has no row. Nothing runs beside a single row, and no step is missed."""


class Applier:
    """Applies results row by row, and ends requests, which releases all that they hold, here and in the executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        most_forced: int = 0,
        speculation: Speculation | DraftModelPolicy | None = None,
    ) -> None:
        """`most_forced` is the maximum number of tokens that a grammar may draft for a row; 0 means that rows carry no
        drafts at all. `speculation` makes other drafts; it is told which were right, and which requests are gone."""
        self._most_forced = most_forced
        self._speculation = speculation
        self._scheduler = scheduler
        self._executor = executor
        self._verified: list[Verified] = []
        self._has_ended = False

    def apply(self, row: PlannedRow, scheduled: ScheduledRequest, output: StepOutput, number: int) -> list[Event]:
        """Apply the results of row `number`, whose request is `row.request`, and return its events."""
        request, tokens = row.request, output.sampled[number]
        samples = scheduled.sampling is not None
        assert bool(tokens) == samples, f"{row.kind} row returned {len(tokens)} tokens"
        request.num_pending -= samples
        events: list[Event] = []
        if request.scoring is not None:
            events += self._score(request, row, output.prompt_logprobs.get(number, ()))
        logprobs = output.logprobs.get(number) if output.logprobs else None
        stop = self._accept(request, tokens, logprobs, events)
        computed = row.start + row.num_tokens
        if self._most_forced and row.kind is RowKind.DECODE:
            if row.num_tokens > 1:
                self._judge(request, row.num_tokens - 1, len(tokens) - 1)
            # The KV of accepted drafts is valid; what was computed after them will be overwritten.
            computed = min(row.start + len(tokens), len(request.token_ids))
        if request.pooling is not None:
            if scheduled.pool_from is not None:
                request.pooling.add(output.pooled[number], scheduled.end)
            if row.kind is RowKind.LAST:
                events.append(Pooled(request.request_id, request.pooling.vector(request.prompt_len)))
        self._scheduler.advance(request, scheduled, computed)
        if isinstance(self._speculation, DraftModelPolicy):
            self._speculation.has_read(request, scheduled, len(tokens))
        if stop is not None:
            events.append(self.finish(request, FinishReason.STOP, stop))
        elif (tokens or row.kind is RowKind.LAST) and is_complete(request):
            events.append(self.finish(request, FinishReason.LENGTH))
        elif self._most_forced:
            self._draft(request, output.drafts.get(number, ())[: self._most_forced])
        return events

    def _draft(self, request: Request, forced: tuple[int, ...]) -> None:
        """Replace the request's drafts by what its grammar forces."""
        if request.num_pending:  # with overlap its next row is launched already, and the first of them is in flight
            alone = len(self._scheduler.decoding) == 1
            if len(forced) >= (LEAST_FORCED_ALONE if alone else LEAST_FORCED):
                self._scheduler.await_token(request)
        elif forced or request.drafts:
            self._scheduler.draft(request, forced, "grammar")

    def take_verified(self) -> tuple[Verified, ...]:
        """Return the results of drafts since the last call."""
        taken, self._verified = tuple(self._verified), []
        return taken

    def take_ended(self) -> bool:
        """Return whether any request has ended since the last call."""
        ended, self._has_ended = self._has_ended, False
        return ended

    def _judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        assert request.drafts is not None
        method = request.drafts.method
        self._verified.append(Verified(request.request_id, method, num_drafted, num_accepted))
        if self._speculation is not None and method != "grammar":
            self._speculation.judge(request, num_drafted, num_accepted)

    def _score(self, request: Request, row: PlannedRow, scores: tuple[TokenLogprobs, ...]) -> list[Event]:
        """Add to the prompt's log-probabilities; they are sent once, with the prompt's last chunk."""
        assert request.scoring is not None
        logprobs = request.scoring.logprobs
        logprobs += scores
        if row.kind is not RowKind.LAST:
            return []
        assert len(logprobs) == request.prompt_len - 1, "every prompt token but the first has one"
        request.scoring = None
        return [PromptLogprobs(request.request_id, tuple(logprobs))]

    def _accept(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        events: list[Event],
    ) -> Token | None:
        """Append new tokens and their events, up to a stop token, which is returned."""
        for i, token_id in enumerate(tokens):
            event = Token(request.request_id, token_id, logprobs[i] if logprobs else None)
            if is_stop_token(request, token_id):
                return event
            request.token_ids.append(token_id)
            events.append(event)
        return None

    def finish(self, request: Request, reason: FinishReason, stop: Token | None = None) -> Event:
        self._release(request, by_itself=reason is FinishReason.STOP)
        usage = request.usage(stop_token=stop is not None)
        if stop is None:
            return Finished(request.request_id, reason, usage)
        return Finished(request.request_id, reason, usage, stop.token_id, stop.logprobs)

    def fail(self, request: Request, code: ErrorCode, message: str) -> Event:
        self._release(request)
        return Failed(request.request_id, code, message)

    def _release(self, request: Request, *, by_itself: bool = False) -> None:
        self._has_ended = True
        self._scheduler.release(request, by_itself=by_itself)
        self._executor.forget([request.request_id])
        if self._speculation is not None:
            self._speculation.forget(request.request_id)
