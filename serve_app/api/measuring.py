"""Owns the measuring of a route: every request that reaches it is counted once, however it ends.
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
"""Key of the scope: the request's RequestTimes."""
FACTS = "chunkserve.facts"
"""Key of the scope: its RequestFacts."""


class MeasuresRequests:
    """Round a route that generates text, and that marks in its RequestTimes and RequestFacts how far it has come."""

    def __init__(self, app: ASGIApp, recorder: IngressRecorder, trace: Trace | None = None) -> None:
        self._app = app
        self._recorder = recorder
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, RequestTimes(), RequestFacts())
        try:
            await self._app({**scope, TIMES: request.times, FACTS: request.facts}, receive, send)
        except (ClientGone, asyncio.CancelledError):  # servers say it in one of two ways
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
        except Exception:  # a fault in what describes requests must not end one
            logger.exception("a request could not be traced")


@dataclass(frozen=True, slots=True)
class _Request:
    scope: Scope
    times: RequestTimes
    facts: RequestFacts
