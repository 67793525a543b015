"""Keeps a silent stream open with comments, which every client of server-sent events skips.
Never sends one inside a frame, before the response has begun or after it has ended, and arms no timer per token."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from serve_app.api.requests.deadline import now

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """Wraps the `send` of one stream that has begun. Each message must consist of whole frames.

    One timer per stream checks whether the silence has lasted long enough, and is set again for the next possible time.
    """

    def __init__(self, send: Send, idle_s: float) -> None:
        self._send = send
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._last_sent = now()
        self._sending = False
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(idle_s, self._look)

    async def send(self, message: Message) -> None:
        while self._comment is not None:  # a comment is being sent; if the client has gone, this raises
            await self._comment
        self._sending = True
        try:
            await self._send(message)
        finally:
            self._sending = False
            self._last_sent = self._loop.time()

    async def close(self) -> None:
        """Stop. Call it when nothing more is sent: after the last message, or when the stream is abandoned."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)  # the stream knows if the client is gone

    def _look(self) -> None:
        silent_s = 0.0 if self._sending else self._loop.time() - self._last_sent
        if silent_s < self._idle_s:
            self._timer = self._loop.call_later(self._idle_s - silent_s, self._look)
        else:
            self._comment = asyncio.ensure_future(self._send_comment())

    async def _send_comment(self) -> None:
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        self._comment = None
        self._last_sent = self._loop.time()
        self._timer = self._loop.call_later(self._idle_s, self._look)
