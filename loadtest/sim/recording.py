"""Owns the timestamps of one simulated request, and the timeline that is made from them.
Never judges; the tally does, as for answers of real servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol import Event, Finished, Scheduled, Token
from loadtest.timeline import FAILED, OK, REJECTED, TOO_MUCH, Timeline
from serve_app.errors.api_error import ApiError


@dataclass(slots=True)
class Recording:
    """The record of one request, in simulated seconds."""

    due: float
    num_prompt_tokens: int
    num_waiting_outside: int = 0
    """Requests that waited at the gate when this one left it."""
    begun: float | None = None
    """When the request's first chunk began."""
    arrivals: list[float] = field(default_factory=list)
    """Times at which its tokens reached the client, one each."""
    num_cached_tokens: int = 0
    num_moves: int = 0
    finish_reason: str | None = None
    error: ApiError | None = None
    """Why the answer is incomplete."""

    def note(self, event: Event, at_s: float) -> None:
        """Record an event that reached the client."""
        if isinstance(event, Token):
            self.arrivals.append(at_s)
        elif isinstance(event, Scheduled) and self.begun is None:
            self.begun = at_s
            self.num_cached_tokens = event.cached_tokens
        elif isinstance(event, Finished):
            self.finish_reason = event.reason.value

    def ended(self, at_s: float) -> Timeline:
        """Make the request's timeline. It was sent when it was due: nothing delays a simulated client."""
        return Timeline(
            due=self.due,
            sent=self.due,
            ended=at_s,
            outcome=self._outcome,
            arrivals=tuple(self.arrivals),
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=len(self.arrivals),
            finish_reason=self.finish_reason,
            queue_ms=None if self.begun is None else 1e3 * (self.begun - self.due),
            retry_after=self.error is not None and "Retry-After" in self.error.headers,
            error=None if self.error is None else f"{self.error.status}: {self.error.message}",
        )

    @property
    def _outcome(self) -> str:
        """The outcome as a client sees it: a stream that has begun can fail, but can no longer be refused."""
        if self.error is None:
            return OK
        return REJECTED if self.error.status in TOO_MUCH and not self.arrivals else FAILED
