"""Owns the outermost ASGI layer, around Ray Serve's own: headers that Ray reads, and errors that Ray reports or omits.
Never changes an answer of our app, and buffers nothing but Ray's one-line texts."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray.serve.exceptions import RequestCancelledError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.edge.client_state import track_client
from serve_app.edge.cors import Policy, RefusedRequest, told
from serve_app.edge.limits import REQUEST_ID
from serve_app.edge.refusals import NO_REPLICA, NO_ROUTE, REPLICA_LOST, Refusal
from serve_app.errors.api_error import ApiError
from serve_app.errors.refusal import ANTHROPIC_PATH, anthropic_error

logger = logging.getLogger("ray.serve")

RESPONSES_PATH = "/v1/responses"
LAST_WORD_S = 10
"""How long the client may take to accept an answer from here: its socket may be full, and nobody else watches it."""

_RAYS_OWN = ("/-/healthz", "/-/routes")
"""Paths on which Ray's plain texts are what probes expect."""

_ID = b"x-request-id"
_DECODED = {
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"x-session-id",
    b"serve-multiplexed-model-id",
    b"traceparent",
    b"tracestate",
}
"""Headers, with `-` for `_`, that Ray decodes as UTF-8 and fails on if they are not."""
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d{1,18})')


class Guard:
    """`speaks_for_ray`: put Ray's errors, and what it omits when a replica is lost, into the API's shape. Only if all
    applications are ours, because others may answer with plain texts."""

    def __init__(self, app: ASGIApp, *, speaks_for_ray: bool, cors: Sequence[Policy] = ()) -> None:
        self._app = app
        self._cors = cors
        self._speaks_for_ray = speaks_for_ray

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _keep_valid_id(scope["headers"])
        if (name := _undecodable(scope["headers"])) is not None:
            text = f"The header {name} is not UTF-8."
            await _Answer(scope, send, self._cors).refuse(ApiError(400, text, param=name, code="invalid_header"))
        elif self._speaks_for_ray:
            await self._translated(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _translated(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(scope, send, self._cors)
        try:
            await self._app(scope, receive, answer.send)
        except (asyncio.CancelledError, RequestCancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Raised although nobody cancelled us: this is how Ray ends a request that exceeded `request_timeout_s`.
            await answer.complete(_TOO_LONG)
        except Exception as error:  # uvicorn would answer with plain text, and log nothing
            logger.error("a request failed in Ray Serve", exc_info=error)
            text = "The server failed unexpectedly."
            await answer.complete(ApiError(500, text, type="server_error", code="internal_error"))
        else:
            await answer.complete(_api_error(REPLICA_LOST))


class _Answer:
    """One response on its way from Ray to the server."""

    def __init__(self, scope: Scope, send: Send, cors: Sequence[Policy]) -> None:
        self._path: str = scope["path"]
        self._headers = Headers(scope=scope)
        self._asked, self._cors = RefusedRequest(scope["method"], self._path, self._headers), cors
        self._send = send
        self._client = track_client(scope)
        self._is_started = False
        self._is_complete = False
        self._is_stream = False
        self._last = b""
        self._replacement: tuple[ApiError, dict[str, str]] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._replacement = self._instead_of(message)
            if self._replacement is not None:
                return
            self._is_started = True
            self._is_stream = _content_type(message).startswith("text/event-stream")
        else:
            more = message.get("more_body", False)
            if self._replacement is not None:
                if not more:
                    await self.refuse(*self._replacement)
                return
            self._is_complete = not more
            self._last = message.get("body", b"") or self._last
        await self._send(message)

    async def refuse(self, error: ApiError, headers: dict[str, str] | None = None) -> None:
        """Send a complete answer with the error."""
        self._is_started = self._is_complete = True
        body = json.dumps(self._told(error)).encode()
        named = {"content-type": "application/json", "content-length": str(len(body))}
        named["x-request-id"] = self._headers.get("x-request-id") or str(uuid.uuid4())
        says = told(self._cors, self._asked)
        named |= {name.lower(): value for name, value in error.headers.items()} | (headers or {}) | says.headers
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        start: Message = {"type": "http.response.start", "status": 200 if says.is_granted else error.status}
        start["headers"] = encoded
        await self._say(start, {"type": "http.response.body", "body": body})

    async def _say(self, *messages: Message) -> None:
        with suppress(TimeoutError):  # the server closes the connection of an incomplete answer
            async with asyncio.timeout(LAST_WORD_S):
                for message in messages:
                    await self._send(message)

    async def complete(self, error: ApiError) -> None:
        """Report what happened if Ray did not: as the answer, or in the last frame of a stream. Any other answer that
        has begun is left to the server, which closes the connection, so that nobody takes it for whole. So is one whose
        client the ingress has given up: nothing was lost."""
        if self._is_complete or self._client.is_gone:
            return
        if not self._is_started:
            await self.refuse(error)
        elif self._is_stream:
            self._is_complete = True
            await self._say({"type": "http.response.body", "body": self._frames(error)})

    def _instead_of(self, message: Message) -> tuple[ApiError, dict[str, str]] | None:
        """Return what to send instead of Ray's error. Our app's errors are JSON; a plain text is Ray's."""
        status = message["status"]
        if status < 400 or self._path.endswith(_RAYS_OWN) or not _content_type(message).startswith("text/plain"):
            return None
        error = _RAYS_ERRORS.get(status)
        if error is None:
            return None
        kept = Headers(raw=message.get("headers", []))
        return error, {name: kept[name] for name in ("x-request-id", "retry-after") if name in kept}

    def _is_on(self, path: str) -> bool:
        """Ignore the route prefix, which the path still has in a proxy."""
        return self._path.endswith(path) or f"{path}/" in self._path

    def _told(self, error: ApiError) -> dict[str, Any]:
        return anthropic_error(error, None) if self._is_on(ANTHROPIC_PATH) else error.body()

    def _frames(self, error: ApiError) -> bytes:
        if self._is_on(ANTHROPIC_PATH):
            return _event("error", self._told(error))
        if self._is_on(RESPONSES_PATH):
            number = max((int(number) for number in _SEQUENCE_NUMBER.findall(self._last)), default=-1) + 1
            told = {"code": error.code, "message": error.message, "param": None}
            return _event("error", {"type": "error", "sequence_number": number, **told})
        return f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n".encode()


def _event(name: str, payload: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(payload)}\n\n".encode()


def _content_type(message: Message) -> str:
    return next((value.decode("latin-1") for name, value in message.get("headers", ()) if name == b"content-type"), "")


def _keep_valid_id(headers: list[tuple[bytes, bytes]]) -> None:
    """Drop X-Request-Id unless there is exactly one and it is well formed. Ray echoes and logs it, and makes one if
    there is none."""
    given = [value for name, value in headers if name == _ID]
    if given and (len(given) > 1 or not REQUEST_ID.fullmatch(given[0].decode("latin-1"))):
        headers[:] = [(name, value) for name, value in headers if name != _ID]


def _undecodable(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if not value.isascii() and name.replace(b"_", b"-") in _DECODED:
            try:
                value.decode()
            except UnicodeDecodeError:
                return name.decode("latin-1")
    return None


def _api_error(refusal: Refusal) -> ApiError:
    headers = {"retry-after": "1"} if refusal.is_temporary else {}
    return ApiError(refusal.status.value, refusal.message, type=refusal.type, code=refusal.code, headers=headers)


_TOO_LONG = ApiError(
    408, "The request took longer than this server, or its own header, allows.", code="request_timeout"
)
_RAYS_ERRORS = {
    404: _api_error(NO_ROUTE),
    408: _TOO_LONG,
    429: ApiError(429, "Too many requests wait.", type="rate_limit_error", code="queue_full"),
    500: _api_error(REPLICA_LOST),
    503: _api_error(NO_REPLICA),
}
