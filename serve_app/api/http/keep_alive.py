"""Owns the comments that keep a silent stream open: a line that every client of server-sent events skips.
Never sends one into a frame, before the response has begun or after it has ended, and arms no timer for a token."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from serve_app.api.requests.deadline import now

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """The `send` of one stream, which has begun when this is made. Each message that goes through is whole frames.

    One timer a stream looks when the silence may have lasted long enough, and then is set for when it may next.
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
        while self._comment is not None:  # it is on its way; if it found nobody there, that is raised here
            await self._comment
        self._sending = True
        try:
            await self._send(message)
        finally:
            self._sending = False
            self._last_sent = self._loop.time()

    async def close(self) -> None:
        """To be called when nothing more is sent: after the last message, or when the stream is given up."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)  # that nobody was there, the stream has learned

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
