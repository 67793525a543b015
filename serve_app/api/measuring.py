"""Measures a route: counts every request that reaches it once, however it ends.
Never changes a request or an answer, and does nothing per token."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.http.asgi import ClientGone
from serve_app.api.request_facts import EndedRequest, RequestFacts, Trace
from serve_app.metrics.ingress_recorder import IngressRecorder, Outcome
from serve_app.metrics.request_times import RequestTimes

logger = logging.getLogger(__name__)

TIMES = "chunkserve.times"
"""Key of the request's RequestTimes in the scope."""
FACTS = "chunkserve.facts"
"""Key of the request's RequestFacts in the scope."""


class MeasuresRequests:
    """Middleware of a route that runs the model, and that notes its progress in its RequestTimes and RequestFacts."""

    def __init__(self, app: ASGIApp, recorder: IngressRecorder, trace: Trace | None = None) -> None:
        self._app = app
        self._recorder = recorder
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, RequestTimes(), RequestFacts())
        try:
            await self._app({**scope, TIMES: request.times, FACTS: request.facts}, receive, send)
        except (ClientGone, asyncio.CancelledError):  # servers report a closed connection in one of these two ways
            self._ended(request, "client_gone")
            raise
        except Exception as error:
            self._ended(request, "error", error)
            raise
        self._ended(request, "complete" if request.times.is_answered else "incomplete")

    def _ended(self, request: _Request, outcome: Outcome, error: Exception | None = None) -> None:
        self._recorder.ended(request.times, outcome, error)
        if self._trace is None:
            return
        try:
            self._trace(EndedRequest(request.scope, request.times, request.facts, outcome, error))
        except Exception:  # a fault in tracing must not end the request
            logger.exception("a request could not be traced")


@dataclass(frozen=True, slots=True)
class _Request:
    scope: Scope
    times: RequestTimes
    facts: RequestFacts
