"""Owns whether requests are held back before the API, and waits for those that are inside.
Never ends a request."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send


class Pausing:
    """An ASGI middleware that lets POSTs wait while it is paused. Everything else passes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._num_inside = 0

    @property
    def is_paused(self) -> bool:
        return not self._open.is_set()

    def pause(self) -> None:
        """Let new requests wait until `resume`. Idempotent."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def emptied(self) -> None:
        """Wait until no request is inside."""
        await self._empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()
