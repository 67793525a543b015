"""Owns the measuring of a route: every request that reaches it is counted once, however it ends.
Never changes a request or an answer, and does nothing per token."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.asgi import ClientGone
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.request_times import RequestTimes

TIMES = "chunkserve.times"
"""Key of the scope: the request's RequestTimes."""


class MeasuresRequests:
    """Round a route that generates text, and that marks in its RequestTimes how far it has come."""

    def __init__(self, app: ASGIApp, recorder: IngressRecorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        times = RequestTimes()
        try:
            await self._app({**scope, TIMES: times}, receive, send)
        except (ClientGone, asyncio.CancelledError):  # servers say it in one of two ways
            self._recorder.ended(times, "client_gone")
            raise
        except Exception as error:
            self._recorder.ended(times, "error", error)
            raise
        self._recorder.ended(times, "complete" if times.is_answered else "incomplete")
