"""Owns one request to an ASGI app in the same process, and the reading of its response as it comes.
Never looks into a body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType

from starlette.types import ASGIApp, Message, Scope

_OWN_HEADERS = {"accept-encoding", "connection", "content-encoding", "content-length", "content-type", "host", "te"}
_OWN_HEADERS |= {"transfer-encoding", "expect", "upgrade"}
"""Headers of the client's connection and body, which are not those of this request."""


class Exchange:
    """Leaving the block ends the request: for the app, the client has gone then."""

    def __init__(self, app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """`headers`: the client's; those of its connection are left out."""
        self._app, self._body = app, body
        passed = [(name.lower(), value) for name, value in headers.items() if name.lower() not in _OWN_HEADERS]
        passed += [("content-type", "application/json"), ("content-length", str(len(body)))]
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in passed],
            "client": None,
            "server": None,
        }
        self._is_sent = False
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def __aenter__(self) -> Exchange:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._left.set()
        self._task.cancel()
        await asyncio.wait((self._task,))  # the engine's stream is closed when this returns

    async def status(self) -> int:
        """Wait for the response's status. Raises what the app raised instead of sending one."""
        message = await self._next()
        assert message is not None, "the app sent no response"
        status: int = message["status"]
        return status

    async def body(self) -> bytes:
        """Wait for the whole body."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it is sent. What was sent meanwhile comes as one part."""
        is_over = False
        while not is_over:
            part = bytearray()
            while not is_over and not (part and self._messages.empty()):
                message = await self._next()
                is_over = message is None or not message.get("more_body", False)
                part += b"" if message is None else message.get("body", b"")
            if part:
                yield bytes(part)

    async def _next(self) -> Message | None:
        message = await self._messages.get()
        if message is None:
            self._task.result()
        return message

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            # From a callback, so that the task is done when its reader wakes.
            asyncio.get_running_loop().call_soon(self._messages.put_nowait, None)

    async def _receive(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages.put_nowait(message)
