"""Turns the engine's events of one answer into pieces of final text, with the finish reason and the usage.
Never writes a byte of HTTP; streamed and whole answers are made from the same pieces."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from engine.protocol import (
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Scheduled,
    Token,
    TokenLogprobs,
    Usage,
)
from serve_app.admission.gate import AdmissionTicket
from serve_app.api.generation.field_grammars import too_much_work
from serve_app.api.generation.live import Lifecycle
from serve_app.api.generation.logprobs import ScoredToken, TokenQueue
from serve_app.api.generation.submission import Prepared
from serve_app.api.generation.thoughts import ThoughtCounter
from serve_app.api.text.content_stops import ContentStops
from serve_app.api.text.stop_strings import StopStrings
from serve_app.engines.engine_client import EngineClient, StreamRecord
from serve_app.errors.api_error import ApiError
from serve_app.metrics.request_times import RequestTimes

_REASONS: dict[FinishReason, Literal["stop", "length"]] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is final. `finish_reason` is set on the last piece, and only there.

    `tokens` are the tokens whose text this piece completes; None if the response shows no tokens.
    """

    text: str
    finish_reason: Literal["stop", "length"] | None = None
    tokens: tuple[ScoredToken, ...] | None = None
    stop_string: str | None = None
    """On the last piece: the stop string that ended the answer, if one did."""
    stop_token_id: int | None = None
    """On the last piece: the token that ended the answer, if one did, such as the model's end of sequence."""

    @property
    def matched_stop(self) -> str | int | None:
        """The stop string or the stop token that ended the answer; None if its length did."""
        return self.stop_token_id if self.stop_string is None else self.stop_string


class Completion:
    """Runs one submission, until its last piece. Used once."""

    def __init__(
        self,
        client: EngineClient,
        prepared: Prepared,
        lifecycle: Lifecycle,
        ticket: AdmissionTicket,
        times: RequestTimes,
        session: str | None,
        thoughts: ThoughtCounter | None = None,
        stops: ContentStops | None = None,
    ) -> None:
        """`lifecycle`: has the submission's deadline, for the case that the engine does not keep it.
        `thoughts`: given if the model marks its thoughts. `stops`: given if the answer may have thoughts or calls.
        `ticket`: has been dispatched. Both it and `times` are informed of the engine's progress."""
        self.submission = prepared.submission
        self.constrained_by = prepared.constrained_by
        self._client = client
        self._detokenizer = prepared.detokenizer
        self._stops = stops or StopStrings(prepared.stops, shown=prepared.shows_stop)
        self._shows_stop = prepared.shows_stop
        self._echo = prepared.echo
        self._lifecycle = lifecycle
        self._bound = lifecycle.bound()
        self._ticket = ticket
        self._times = times
        times.expects()
        self._session = session
        self._tokens = TokenQueue() if prepared.shows_tokens else None
        self._min_tokens = prepared.submission.sampling.min_tokens
        self._thoughts = thoughts
        self._generated = 0
        self._cached = 0
        self._final_usage: Usage | None = None
        self.record = StreamRecord()
        self.finish_reason: Literal["stop", "length"] | None = None
        """Set once the answer is complete."""
        self.prompt_scores: tuple[TokenLogprobs, ...] | None = None
        """The scores of the prompt's tokens from the second on, once they are known."""
        self.vector = array("d")
        """The vector of a pooled prompt, once it is known. Compact: a response may have two thousand."""

    @property
    def usage(self) -> Usage:
        """The usage of what was yielded so far; exact after the last piece. Tokens that a stop string cut off count."""
        return self._final_usage or Usage(len(self.submission.prompt_token_ids), self._generated, self._cached)

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of the tokens in `usage` are thoughts; None if the model does not mark its thoughts."""
        return None if self._thoughts is None else self._thoughts.count

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield a piece for each item of the engine's stream: tokens that arrive together leave together.

        The first one comes as soon as the engine has accepted the request, and may be empty.
        Closing this generator aborts the request.

        Raises:
            EngineError, ApiError: before the first piece, or between two.
        """
        last: Piece | None = None
        deadline = self._lifecycle.deadline
        left_s = None if deadline is None else deadline.left_s()  # now: its turn comes after other parts of the request
        self._lifecycle.given_to_engine()
        self._times.given_to_engine()
        self.record.given, unread_s = self._times.now(), self._times.unread_s
        async with aclosing(self._stream(left_s)) as items:
            while (events := await self._next(items)) is not None:
                self._ticket.started()
                piece = self._apply(events)
                if piece.finish_reason is not None:
                    last, self.finish_reason, self.record.is_complete = piece, piece.finish_reason, True
                    break
                yield piece
                if self._generated:
                    self._times.has_token()
        # The engine's stream is closed by now: after a stop string, the request's blocks and its place are free even
        self._ticket.finished()  # while a slow client still reads the end.
        if last is None:
            raise EngineError(ErrorCode.STEP_FAILED, "the engine's stream ended without a terminal event")
        self._times.returned()
        self.record.returned, self.record.unread_s = self._times.now(), self._times.unread_s - unread_s
        yield last
        if self._generated:
            self._times.has_token()

    def _stream(self, left_s: float | None) -> AsyncGenerator[list[Event], None]:
        submission = replace(self.submission, timeout_s=left_s)
        return self._client.stream(submission, session=self._session, record=self.record)

    async def _next(self, items: AsyncGenerator[list[Event], None]) -> list[Event] | None:
        """Return the engine's next item; None at the end. Never waits long past the deadline: the engine cannot end a
        request that is still queued in front of it, nor one that hangs with it."""
        with self._bound:
            return await anext(items, None)

    def _apply(self, events: list[Event]) -> Piece:
        texts: list[str] = []
        for event in events:
            match event:
                case Token():
                    texts.append(self._accept(event))
                    if self._stops.matched:
                        return self._piece(texts, "stop")
                case Scheduled():
                    self._cached = event.cached_tokens
                    self._times.has_begun()
                    if self._echo is not None and self.submission.sampling.prompt_logprobs is None:
                        texts.append(self._echo.text)
                        if self._tokens is not None:
                            self._tokens.skip(len(self._echo.text))
                case PromptLogprobs():
                    self.prompt_scores = event.logprobs
                    texts.append(self._show_prompt(event))
                case Pooled():
                    self.vector = array("d", event.values)
                case Finished():
                    self.record.times, self.record.is_over = event.times, True
                    reason = self._finish(event)
                    return self._last(texts + self._end(event), reason, event)
                case Failed():
                    self.record.times, self.record.is_over = event.times, True
                    deadline = self._lifecycle.deadline if event.code is ErrorCode.DEADLINE_EXCEEDED else None
                    if deadline is not None and deadline.has_passed:
                        raise deadline.exceeded()  # the engine only knows the time that was left at submission
                    if event.code is ErrorCode.GRAMMAR_LIMIT_EXCEEDED and self.constrained_by is not None:
                        raise too_much_work(self.constrained_by, event.message)
                    raise EngineError(event.code, event.message)
        return self._piece(texts)

    def _piece(self, texts: list[str], reason: Literal["stop", "length"] | None = None) -> Piece:
        text = "".join(texts)
        if self._tokens is None:
            return Piece(text, reason, stop_string=self._stops.matched)
        tokens = self._tokens.take(len(text)) if reason is None else self._tokens.take_all()
        return Piece(text, reason, tokens, self._stops.matched)

    def _last(self, texts: list[str], reason: Literal["stop", "length"], event: Finished) -> Piece:
        """Make the last piece. The text that the end completes may still contain a stop string."""
        piece = self._piece(texts, "stop" if self._stops.matched else reason)
        return piece if self._stops.matched else replace(piece, stop_token_id=event.stop_token_id)

    def _show_prompt(self, event: PromptLogprobs) -> str:
        if self._echo is None:
            return ""
        token_ids, text = self.submission.prompt_token_ids, self._echo.text
        if self._tokens is not None:
            self._tokens.add_prompt(token_ids, self._echo.offsets, event.logprobs, len(text))
        return text

    def _accept(self, event: Token) -> str:
        self._generated += 1
        text = self._detokenizer.push(event.token_id)
        if self._thoughts is not None:
            self._thoughts.push(text)
        if self._tokens is not None:
            self._tokens.add(event.token_id, event.logprobs, len(text))
        return self._search(text)

    def _search(self, text: str) -> str:
        """Return the part of the text that no stop string can cut off any more."""
        return self._stops.push(text) if self._generated >= self._min_tokens else self._stops.skip(text)

    def _end(self, event: Finished) -> list[str]:
        """Return the texts that the end completes: text that waited for more, and the text of the token that ended the
        answer, if it is shown. Usage counts that token in any case."""
        shown = event.stop_token_id is not None and self._shows_stop
        waited = "" if shown else self._detokenizer.finish()
        if self._tokens is not None:
            self._tokens.complete(len(waited))
        return [self._search(waited), self._stops.flush(), self._stop_token(event, shown=shown)]

    def _stop_token(self, event: Finished, *, shown: bool) -> str:
        if event.stop_token_id is None:
            return ""
        if self._thoughts is not None:
            self._thoughts.push("")
        text = self._detokenizer.push(event.stop_token_id) + self._detokenizer.finish() if shown else ""
        if self._tokens is not None:
            # Clients that asked for one token cut the last entry off, so the stop token needs an entry.
            self._tokens.add(event.stop_token_id, event.stop_logprobs, len(text))
        return text

    def _finish(self, event: Finished) -> Literal["stop", "length"]:
        if event.reason not in _REASONS:
            # The ingress did not abort it, so the answer is incomplete, and OpenAI has no finish reason for that.
            text = "The request was aborted by the server."
            raise ApiError(503, text, type="server_error", code="aborted", headers={"Retry-After": "1"})
        self._final_usage = event.usage
        return _REASONS[event.reason]
