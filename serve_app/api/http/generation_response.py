"""Adds to the responses of the generation routes: the time until they began, the load, and keep-alive comments.
Never holds a message back, and never begins a response early: a refusal keeps its status."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.http.asgi import ClientGone
from serve_app.api.http.keep_alive import KeepAlive
from serve_app.api.http.load_report import TOLD, LoadReport, load_header
from serve_app.api.requests.deadline import now
from serve_app.errors.api_error import to_api_error
from serve_app.errors.refusal import refusal

PROCESSING_MS = "openai-processing-ms"


class GenerationResponses:
    """Middleware of a route. `keep_alive_s`: see KeepAlive; 0 turns it off. `report`: the load for load balancers."""

    def __init__(self, app: ASGIApp, keep_alive_s: float, report: LoadReport = lambda: None) -> None:
        self._app = app
        self._keep_alive_s = keep_alive_s
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send, self._keep_alive_s, lambda: load_header(scope, self._report))
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:
            if response.begun or isinstance(error, ClientGone):
                raise
            # Answered here and not further out, so that a refusal has the processing time, too.
            await refusal(to_api_error(error), scope)(scope, receive, response.send)
        finally:
            await response.close()


class _Response:
    def __init__(self, send: Send, keep_alive_s: float, load: Callable[[], str | None]) -> None:
        self._send = send
        self._load = load
        self._keep_alive_s = keep_alive_s
        self._keep_alive: KeepAlive | None = None
        self._arrived = now()
        self.begun = False

    async def send(self, message: Message) -> None:
        if not self.begun:
            await self._begin(message)
            return
        await self._send(message)
        if not message.get("more_body", False):
            await self.close()  # now, and not only when the route returns: no comment may follow the last message

    async def _begin(self, message: Message) -> None:
        self.begun = True
        headers = MutableHeaders(scope=message)
        headers[PROCESSING_MS] = str(round((now() - self._arrived) * 1000))
        if (load := self._load()) is not None:
            headers[TOLD] = load
        await self._send(message)
        if self._keep_alive_s and _is_event_stream(message):
            self._keep_alive = KeepAlive(self._send, self._keep_alive_s)
            self._send = self._keep_alive.send

    async def close(self) -> None:
        if self._keep_alive is not None:
            await self._keep_alive.close()


def _is_event_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")
