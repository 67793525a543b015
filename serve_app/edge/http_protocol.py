"""Owns the limits that uvicorn lacks: how long and large a request's head and trailers may be, and what is answered.
Never reads a body; the app limits those, see serve_app.api.http.asgi."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.edge.cors import Policy, RefusedRequest, told
from serve_app.edge.limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES
from serve_app.edge.refusals import HEAD_TOO_LARGE, HEAD_TOO_SLOW, MALFORMED, URL_TOO_LONG, Refusal

LINGER_S = 10
"""How long the rest of a body is read and discarded after its request was answered without it."""

_OFFER = (b"upgrade", b"http2-settings")
"""The headers of an offer of another protocol, which `connection` names, too."""
_FIELD_BYTES = 4  # ": " and the end of the line


class _Refused(Exception):
    """Ends the parsing of a head or of trailers; httptools wraps it as it does its own errors."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Refusals are in the API's shape, and end the connection."""

    cors: tuple[Policy, ...] = ()
    """Set once per process, because Ray makes the connections."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._began_head = False  # in the read that is being parsed
        self._head_bytes = 0  # of an incomplete head
        self._in_trailers = False  # or between the size of a chunk and its first byte
        self._began_trailer = False  # in the read that is being parsed
        self._num_trailers = 0
        self._trailer_bytes = 0
        self._unfinished_bytes = 0  # of a trailer
        self._refusal = MALFORMED
        self._is_offer = False
        """Whether the head that is being parsed offers another protocol, which is not taken."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._began_head = self._began_trailer = False
        self._parse(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # it may be a WebSocket's now
            return
        if self._in_head:
            self._check_unfinished(len(data))
        elif self._in_trailers and not self._began_trailer:
            self._check_unfinished_trailer(len(data))
        elif self._is_idle():
            self._start_timer(LINGER_S, self.transport.close)

    def _parse(self, data: bytes) -> None:
        """Do as uvicorn, but take a request that offers another protocol than WebSocket as one that offers none. Java's
        own client offers HTTP/2 with each new connection (`Upgrade: h2c`), and llhttp reads no body behind that."""
        self._unset_keepalive_if_required()
        parts = [memoryview(data)]
        while parts:
            part = parts.pop()
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserError:
                text = "Invalid HTTP request received."
                self.logger.warning(text)
                self.send_400_response(text)
                return
            except httptools.HttpParserUpgrade as met:
                if not self._is_offer:
                    if self._should_upgrade():
                        self.handle_websocket_upgrade()
                    return
                (place,) = met.args
                rest, head = part[place:], memoryview(self._head_without_offer())
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                parts = [rest, head] if rest else [head]

    def _head_without_offer(self) -> bytes:
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._began_head, self._head_bytes = True, True, 0
        self._num_trailers = self._trailer_bytes = self._unfinished_bytes = 0
        if self.cycle is not None:  # a connection's first head is timed from the connection's start
            self._stop_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. llhttp also reports trailers here; they are discarded, because nothing uses them and uvicorn
        would append them to the headers of a request that is already running."""
        if self._in_head:
            super().on_header(name, value)
            return
        self._began_trailer = True
        self._num_trailers += 1
        self._unfinished_bytes = 0
        self._trailer_bytes += len(name) + len(value) + _FIELD_BYTES
        if self._trailer_bytes > MAX_HEAD_BYTES or self._num_trailers > MAX_HEADERS:
            self._refusal = HEAD_TOO_LARGE
            raise _Refused

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        if refusal := self._too_large():
            self._refusal = refusal
            raise _Refused
        offers = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        self._is_offer = offers and not self._should_upgrade()
        if not self._is_offer:
            super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Note the size of a chunk. After that of the last one, which is empty, come the trailers."""
        self._in_trailers = self._began_trailer = True

    def on_body(self, body: bytes) -> None:
        self._in_trailers = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_trailers = False
        self._stop_timer()
        if not self._is_offer:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        unread = self.cycle.more_body and not self.pipeline  # one that a pipelined request follows was read whole
        super().on_response_complete()
        if unread and not self.transport.is_closing():
            self._start_timer(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Send our refusal. uvicorn calls this for every request that it cannot read; its own answer is plain text."""
        self._refuse(self._refusal)

    def _check_unfinished(self, num_read: int) -> None:
        # A read may begin with the previous request's body, so the read in which a head begins is not counted. Nothing
        # comes before a connection's first head.
        if not self._began_head or self.cycle is None:
            self._head_bytes += num_read
        if self._head_bytes > MAX_HEAD_BYTES + MAX_URL_BYTES:
            self._refuse(HEAD_TOO_LARGE)
        elif self._timer is None:
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def _check_unfinished_trailer(self, num_read: int) -> None:
        """Count a read in the middle of a trailer: it is kept until its end, and only then reported."""
        self._unfinished_bytes += num_read
        if self._trailer_bytes + self._unfinished_bytes > MAX_HEAD_BYTES:
            self._refuse(HEAD_TOO_LARGE)

    def _is_idle(self) -> bool:
        """Return whether nothing would end the connection. uvicorn stops its keep-alive timer at every read, and starts
        it only after an answer: not after a body that arrives later than its answer, nor after an empty line."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self._timer is None and self.timeout_keep_alive_task is None

    def _too_large(self) -> Refusal | None:
        if len(self.url) > MAX_URL_BYTES:
            return URL_TOO_LONG
        size = sum(len(name) + len(value) + _FIELD_BYTES for name, value in self.headers)
        return HEAD_TOO_LARGE if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS else None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The previous request is unanswered, and nothing may have been read meanwhile: not the client's fault.
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)
        elif self._head_bytes or self.headers is not None:
            self._refuse(HEAD_TOO_SLOW)
        else:  # nothing was sent, as when a browser connects ahead of time
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        self._stop_timer()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:  # never into the middle of an answer
            self.transport.write(self._told(refusal))
        self.transport.close()

    def _told(self, refusal: Refusal) -> bytes:
        """Write the refusal. The part of the head that was read says which page is asking."""
        if not self.headers or not self.url:
            return refusal.response()
        named = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        path = self.url.partition(b"?")[0].decode("latin-1")
        says = told(self.cors, RefusedRequest(self.parser.get_method().decode("latin-1"), path, named))
        return refusal.response(says.headers, HTTPStatus.OK if says.is_granted else None)

    def _start_timer(self, delay_s: float, action: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
