"""Writes the response header that names the request's hints that had no effect.
Never decides what is a hint: the schemas do, and the code that finds a hint useless for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.requests.hints import Hints, keeping

HEADER = "x-chunkserve-ignored"
"""Names the hints of the request that had no effect, separated by commas."""


class TellsHints:
    """Middleware of a route. `count` is called at a request's end with those of its hints that had no effect, unless
    the request's own `count` is known by then."""

    def __init__(self, app: ASGIApp, *, strict: bool, count: Callable[[Iterable[str]], None]) -> None:
        self._app = app
        self._strict = strict
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored = Hints(strict=self._strict)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and ignored.names:
                MutableHeaders(scope=message)[HEADER] = ", ".join(ignored.names)
            await send(message)

        try:
            with keeping(ignored):
                await self._app(scope, receive, tell)
        finally:
            (ignored.count or self._count)(ignored.names)
