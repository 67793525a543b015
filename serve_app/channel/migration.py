"""Continues a stream at another engine replica when its own fails; what was already delivered is kept.
Never repeats, loses or reorders a token, and never tries forever."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

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
    Submission,
    Token,
    Usage,
)
from serve_app.engines.engine_client import Move, StreamRecord
from serve_app.metrics.channel_counts import ChannelCounts

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 5.0
"""The pause after an attempt. It doubles with each further one until a replica answers again, up to the longest."""
_ELSEWHERE = frozenset({ErrorCode.ENGINE_DEAD, ErrorCode.DRAINING})
"""Failures of a replica. A request's own failures would repeat at every other replica."""
_FULL = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.ADAPTER_UNAVAILABLE})
"""Codes that refuse a new request, but let one that was accepted before look for another replica."""


class Attempt(Protocol):
    """Calls one engine replica once."""

    @property
    def replica_id(self) -> str | None:
        """The replica that answers, as soon as it is known."""
        ...

    async def take(self) -> list[Event]:
        """Return the next events, in order; may raise EngineError."""
        ...

    def close(self, *, complete: bool = False) -> None:
        """End the call if it has not ended. Idempotent. `complete`: its reader has all that it wants."""
        ...


class _WaitOverError(EngineError):
    """No replica has continued the answer in time; there is no time left for another attempt."""


StartAttempt = Callable[[Submission, tuple[str, ...]], Attempt]
"""Makes a call; the strings are the ids of replicas to avoid."""


@dataclass(slots=True)
class _Progress:
    """Holds what the client already has of an answer."""

    asked: Submission
    started: float
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    has_prompt_logprobs: bool = False
    is_pooled: bool = False
    num_attempts: int = 0
    backoff_s: float = 0.0
    """The last pause, if no replica has answered since."""
    deadline: float | None = None
    """When the stream stops looking for another replica; None while one answers."""

    @property
    def num_left(self) -> int:
        assert self.asked.sampling.max_tokens is not None
        return self.asked.sampling.max_tokens - len(self.token_ids)

    def can_move(self, error: EngineError) -> bool:
        if isinstance(error, _WaitOverError):
            return False
        return error.code in _ELSEWHERE or (error.code in _FULL and self.num_attempts > 1)

    def lost_engine(self, error: EngineError) -> bool:
        """Whether the failure is the loss of an engine, and not a refusal that the first replica would give, too."""
        return self.num_attempts > 1 or error.code in _ELSEWHERE

    def rest(self, now: float) -> Submission:
        """Make the request that continues from here. It draws the same random numbers as the same positions before."""
        self.num_attempts += 1
        if self.num_attempts == 1:
            return self.asked
        asked, sampling, count = self.asked, self.asked.sampling, len(self.token_ids)
        return replace(
            asked,
            request_id=f"{asked.request_id}.{self.num_attempts}",
            prompt_token_ids=(*asked.prompt_token_ids, *self.token_ids),
            sampling=replace(
                sampling,
                max_tokens=self.num_left,
                min_tokens=max(sampling.min_tokens - count, 0),
                prompt_logprobs=None if self.has_prompt_logprobs else sampling.prompt_logprobs,
            ),
            timeout_s=self._left_of(asked.timeout_s, now),
            # A request that has run no longer waits for its first run.
            queue_timeout_s=self._left_of(asked.queue_timeout_s, now) if self.cached_tokens is None else None,
            num_answer_tokens=count,
        )

    def _left_of(self, timeout_s: float | None, now: float) -> float | None:
        return None if timeout_s is None else max(timeout_s - (now - self.started), 0.001)

    def answered(self) -> None:
        """Note that a replica answers."""
        self.deadline, self.backoff_s = None, 0.0

    def next_backoff_s(self) -> float:
        """Return the pause before the next attempt."""
        self.backoff_s = min(2 * self.backoff_s, LONGEST_BACKOFF_S) or FIRST_BACKOFF_S
        return self.backoff_s

    def accept(self, events: list[Event]) -> list[Event]:
        """Return the events that the client does not have yet, as if a single replica had sent all of them. A replica's
        failure is left out."""
        return [accepted for event in events if (accepted := self._accept(event)) is not None]

    def _accept(self, event: Event) -> Event | None:
        match event:
            case Token():
                self.token_ids.append(event.token_id)
            case Scheduled():
                if self.cached_tokens is not None:
                    return None
                self.cached_tokens = event.cached_tokens
            case PromptLogprobs():
                self.has_prompt_logprobs = True
            case Pooled():
                if self.is_pooled:  # it was computed again only because the terminal event was lost
                    return None
                self.is_pooled = True
            case Finished():
                return replace(event, usage=self._usage(event.usage))
            case Failed(code=code) if code in _ELSEWHERE:
                return None
        return event

    def _usage(self, last: Usage) -> Usage:
        """Compute the usage of the whole answer: part of a later attempt's prompt was sampled by earlier attempts."""
        num_prompt = len(self.asked.prompt_token_ids)
        resumed = last.prompt_tokens - num_prompt
        return Usage(num_prompt, resumed + last.completion_tokens, self.cached_tokens or 0)

    def length_reached(self) -> Finished:
        usage = Usage(len(self.asked.prompt_token_ids), len(self.token_ids), self.cached_tokens or 0)
        return Finished(self.asked.request_id, FinishReason.LENGTH, usage)


@dataclass(frozen=True, slots=True)
class Migration:
    """Limits how often and how long a stream looks for another replica."""

    max_migrations: int
    timeout_s: float
    """The time from a replica's failure until another has begun, over all attempts: Serve holds a call while there is
    no replica."""
    max_model_len: int
    """The limit of a request's prompt and answer together, in tokens."""
    counts: ChannelCounts = field(default_factory=ChannelCounts)

    async def stream(
        self, submission: Submission, start: StartAttempt, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one answer, from as many replicas as necessary.

        Raises:
            RequestRejected: the first replica refused the request.
            EngineError: a failure that another replica would repeat, or more failures than allowed.
        """
        record = record or StreamRecord()
        clock = asyncio.get_running_loop().time
        progress = _Progress(_pinned(submission, self.max_model_len), clock())
        avoid: list[str] = []
        heard: float | None = None  # the last news of an engine that was lost
        while True:
            begun = clock()
            if heard is not None:
                record.lost_s += begun - heard
            heard = begun
            attempt = start(progress.rest(begun), tuple(avoid))
            try:
                events = await self._first(attempt, progress.deadline)
                if not isinstance(events[0], Failed):  # an engine may die while the request waits there
                    progress.answered()
                while True:
                    if accepted := progress.accept(events):
                        yield accepted
                    heard = clock()  # only now: until then its reader may have waited for a client
                    match events[-1]:
                        case Failed(code=code, message=text) if code in _ELSEWHERE:
                            raise EngineError(code, text)
                        case Finished() | Failed():
                            return
                    events = await attempt.take()
            except EngineError as error:
                is_loss = progress.lost_engine(error)
                record.before_loss_s += is_loss * (heard - begun)
                if not progress.can_move(error) or progress.num_attempts > self.max_migrations:
                    record.lost_s += is_loss * (clock() - heard)
                    self.counts.failed_migrations += is_loss
                    raise
                avoid += [attempt.replica_id] if attempt.replica_id else []
                failure = error.code
                logger.warning("%s moves to another engine replica: %s", submission.request_id, error)
            finally:
                attempt.close(complete=record.is_complete)
            if progress.token_ids and not progress.num_left:  # only the terminal event was lost
                yield [progress.length_reached()]
                return
            if progress.deadline is None:
                progress.deadline = clock() + self.timeout_s
            self.counts.migrations += 1
            record.moves.append(Move(clock(), failure, attempt.replica_id))
            await asyncio.sleep(progress.next_backoff_s())

    async def _first(self, attempt: Attempt, deadline: float | None) -> list[Event]:
        try:
            async with asyncio.timeout_at(deadline):
                return await attempt.take()
        except TimeoutError:
            text = f"No engine replica went on with the answer within {self.timeout_s:g} s."
            raise _WaitOverError(ErrorCode.ENGINE_DEAD, text) from None


def _pinned(submission: Submission, max_model_len: int) -> Submission:
    """Choose once for all attempts what each engine would otherwise choose by itself."""
    sampling = submission.sampling
    if sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(63))
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=max(max_model_len - len(submission.prompt_token_ids), 0))
    return replace(submission, sampling=sampling)
