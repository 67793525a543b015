"""Owns what is known about one request besides its times, for the traces that are written at its end.
Never holds a prompt's or an answer's text longer than the request lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from serve_app.api.timing.split import EndedTimes
from serve_app.metrics.ingress_recorder import IngressRecorder, Outcome
from serve_app.metrics.request_times import RequestTimes

if TYPE_CHECKING:
    from serve_app.api.openai.choices import Choices
    from serve_app.api.requests.embedding_schema import EmbeddingRequest
    from serve_app.api.requests.schema import ChatRequest, CompletionRequest


@dataclass(slots=True)
class RequestFacts:
    """Filled in as the request progresses; a field that it did not get to stays None."""

    request: ChatRequest | CompletionRequest | EmbeddingRequest | None = None
    session: str | None = None
    answer_id: str | None = None
    choices: Choices | None = None
    model_id: str | None = None
    """The model that was asked for, or its adapter, by the name in the answer."""
    recorder: IngressRecorder | None = None
    """That model's."""
    targets: Mapping[str, Any] = field(default_factory=dict)
    """The request's own service-level targets, as fields of Submission."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that is over. `error`: the client got it instead of an answer."""

    scope: Scope
    facts: RequestFacts
    error: Exception | None
    wall: EndedTimes

    @property
    def times(self) -> RequestTimes:
        return self.wall.times

    @property
    def outcome(self) -> Outcome:
        return self.wall.outcome


Trace = Callable[[EndedRequest], None]
"""Called once for each request, on the event loop."""
