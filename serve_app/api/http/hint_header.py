"""Owns the header that names the hints of a request that had no effect.
Never decides what is a hint; the schemas do, and whoever finds that a model cannot do with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.requests.hints import Hints, keeping

HEADER = "x-chunkserve-ignored"
"""Names, in a response, the hints of its request that had no effect, by commas."""


class TellsHints:
    """Middleware of a route. `count` is told at a request's end which of its hints had no effect."""

    def __init__(self, app: ASGIApp, *, strict: bool, count: Callable[[Iterable[str]], None]) -> None:
        self._app = app
        self._strict = strict
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = Hints(strict=self._strict)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and found.names:
                MutableHeaders(scope=message)[HEADER] = ", ".join(found.names)
            await send(message)

        try:
            with keeping(found):
                await self._app(scope, receive, tell)
        finally:
            self._count(found.names)
