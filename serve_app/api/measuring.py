"""Measures a route: counts every request that reaches it once, however it ends, and keeps where its time went.
Never changes a request or an answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.http.asgi import ClientGone
from serve_app.api.request_facts import EndedRequest, RequestFacts, Trace
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.timing.recent import PATIENCE_S, RecentTimes
from serve_app.api.timing.split import EndedTimes
from serve_app.auth.keys import tenant_of
from serve_app.errors.refusal import REQUEST_ID
from serve_app.metrics.ingress_recorder import IngressRecorder, Outcome
from serve_app.metrics.request_times import RequestTimes

logger = logging.getLogger(__name__)

TIMES = "chunkserve.times"
"""Key of the request's RequestTimes in the scope."""
FACTS = "chunkserve.facts"
"""Key of the request's RequestFacts in the scope."""


class MeasuresRequests:
    """Middleware of a route that runs the model, and that notes its progress in its RequestTimes and RequestFacts.
    `recorder`: for requests that end before it is known which model they ask for."""

    def __init__(
        self, app: ASGIApp, recorder: IngressRecorder, recent: RecentTimes, trace: Trace | None = None
    ) -> None:
        self._app = app
        self._recorder = recorder
        self._recent = recent
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, RequestTimes(), RequestFacts())

        async def timed_send(message: Message) -> None:
            await request.times.send(send, message)

        try:
            await self._app({**scope, TIMES: request.times, FACTS: request.facts}, receive, timed_send)
        except (ClientGone, asyncio.CancelledError):  # servers report a closed connection in one of these two ways
            self._ended(request, "client_gone")
            raise
        except Exception as error:
            self._ended(request, "error", error)
            raise
        self._ended(request, "complete" if request.times.is_answered else "incomplete")

    def _ended(self, request: _Request, outcome: Outcome, error: Exception | None = None) -> None:
        facts, now = request.facts, request.times.now()
        has_tokens = not isinstance(facts.request, EmbeddingRequest)
        (facts.recorder or self._recorder).ended(request.times, outcome, error, has_tokens=has_tokens)
        record, leader = (None, None) if facts.choices is None else facts.choices.last_records
        ended = EndedTimes(facts.answer_id, request.scope[REQUEST_ID], outcome, request.times, now, record, leader)
        self._recent.add(ended, tenant_of(request.scope).name)
        if self._trace is not None:
            self._write_trace(EndedRequest(request.scope, facts, error, ended))

    def _write_trace(self, ended: EndedRequest) -> None:
        """Write the trace now, or in a moment if the engine is about to say where its time went."""
        if ended.wall.awaits_engine:
            asyncio.get_running_loop().call_later(PATIENCE_S, self._write, ended)
        else:
            self._write(ended)

    def _write(self, ended: EndedRequest) -> None:
        assert self._trace is not None
        try:
            self._trace(ended)
        except Exception:  # a fault in tracing must not end the request
            logger.exception("a request could not be traced")


@dataclass(frozen=True, slots=True)
class _Request:
    scope: Scope
    times: RequestTimes
    facts: RequestFacts
