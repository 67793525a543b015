"""Stands between a route and the server: request ids, body limits, disconnected clients, and errors nobody else caught.
Never buffers or re-pipes a response, as middleware over response objects does with every chunk."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.http.body_pace import BodyPace
from serve_app.api.http.wait import Wait, WaitEnded
from serve_app.edge.client_state import give_client_up
from serve_app.edge.limits import BODY_STALL_S, MIN_BODY_BYTES_PER_S
from serve_app.edge.limits import REQUEST_ID as WELL_FORMED_ID
from serve_app.errors.api_error import ApiError, to_api_error
from serve_app.errors.refusal import REQUEST_ID, is_anthropic, refusal

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed the connection, so there is nobody to answer."""


class _StallLimit:
    """Ends a send that takes too long with WaitEnded: put `with limit:` around each send of a response."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._wait = Wait()
        self._num_sends = 0
        self._num_seen = -1

    def __enter__(self) -> None:
        self._num_sends += 1
        self._wait.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wait.__exit__(kind, error, at)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check periodically for the length of the block, instead of arming a timer for each send."""
        self._look()
        try:
            yield
        finally:
            self._timer.cancel()

    def _look(self) -> None:
        """End a send that two consecutive checks have seen. Checks are one limit apart, so a send gets one to two."""
        if self._wait.is_on and self._num_sends == self._num_seen:
            self._wait.end()
        self._num_seen = self._num_sends
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)


class RequestGuard:
    """Gives every response an X-Request-Id, which is the client's own if that is well formed, and turns every exception
    into a response. On Anthropic's routes the id is also sent as `request-id`, where Anthropic's clients look.

    A client that reads nothing for `stall_timeout_s` (at most twice as long) is disconnected, to free what its request
    holds for clients that do read.
    """

    def __init__(self, app: ASGIApp, stall_timeout_s: float, *, names_responses: bool = True) -> None:
        """`names_responses`: add the X-Request-Id; Ray Serve does so by itself."""
        self._app = app
        self._stall_timeout_s = stall_timeout_s
        self._names_responses = names_responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started = _request_id(scope), False
        scope = {**scope, REQUEST_ID: request_id}
        stall = _StallLimit(self._stall_timeout_s)

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._names_responses:
                    MutableHeaders(scope=message).setdefault("X-Request-Id", request_id)
                if is_anthropic(scope):
                    MutableHeaders(scope=message)["request-id"] = request_id
            try:
                with stall:
                    await send(message)
            # OSError: how servers report a closed connection, from ASGI 2.4 on.
            except (OSError, WaitEnded) as error:
                raise ClientGone from error

        with stall.watched():
            try:
                await self._app(scope, receive, guarded_send)
            except ClientGone:
                logger.info("client gone: %s", request_id)
                give_client_up(scope)
            except Exception as error:
                if started:  # too late for a status: the server cuts the connection, which the client can see
                    raise
                try:
                    await refusal(to_api_error(error), scope)(scope, receive, guarded_send)
                except ClientGone:
                    give_client_up(scope)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if WELL_FORMED_ID.fullmatch(given) else uuid.uuid4().hex


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read the request's body.

    Raises:
        ApiError: 415 for another content type, 413 above `limit` bytes, 408 for a body that makes no progress.
        ClientGone: the client left before it had sent the whole body.
    """
    headers = Headers(scope=scope)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "A Content-Encoding is not supported.", code="unsupported_media_type")
    text = f"The body is larger than {limit} bytes."
    too_large = ApiError(413, text, type="request_too_large", code="body_too_large")
    announced = headers.get("content-length", "")[:18]  # no limit has that many digits
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    try:
        return await _read(receive, limit, too_large)
    except TimeoutError:
        raise _too_slow() from None


async def _read(receive: Receive, limit: int, too_large: ApiError) -> bytes:
    body, more, pace = bytearray(), True, BodyPace()
    async with pace:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large
            if more := message.get("more_body", False):
                pace.received(len(body))
    return bytes(body)


def _too_slow() -> ApiError:
    pace = f"nothing for {BODY_STALL_S:g} s, or fewer than {MIN_BODY_BYTES_PER_S} bytes/s"
    text = f"The body made no progress: {pace}."
    return ApiError(408, text, code="request_timeout", headers={"Connection": "close"})


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client closes the connection; call only after the body was read.

    uvicorn reports a closed connection through `receive`, Ray Serve by cancelling this task: both end the work.

    Raises:
        ClientGone: the client left first.
    """
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        try:
            await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = worker.done()
            worker.cancel()
            watcher.cancel()
            await asyncio.wait((worker, watcher))  # the engine's stream is closed when this returns
        (worker if finished else watcher).result()
    finally:
        # The traceback of a task's exception refers to this frame, and this frame to the task. Such a cycle would keep
        # the whole request until a garbage collection, which stops every stream for longer the larger the request is.
        del worker, watcher
    if not finished:
        raise ClientGone


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
