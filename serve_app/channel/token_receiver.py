"""Owns the ingress replica's end of the token channel: one socket, to which every engine replica it calls connects.
Never waits for a reader: one that leaves too much untaken loses its stream, and no other stream notices."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq.asyncio

from engine.protocol import TERMINAL, Event, FinishReason
from serve_app.channel.counts import ChannelCounts
from serve_app.channel.frames import Abort, Entry, Frame, MalformedFrame, decode_frame, encode_abort, unpack
from serve_app.channel.sockets import listen, send_now
from serve_app.errors import ApiError

logger = logging.getLogger(__name__)

_FRAMES_AT_A_TIME = 32
"""Messages that are there are received without a pause; after so many, those who read the streams have their turn."""


@dataclass(slots=True, eq=False)
class TokenStream:
    """The events of one call, in order and once each, from the channel or from the call's own answer."""

    request_id: str
    stream_id: int
    max_unread: int
    """Events that may wait for the reader."""
    replica_id: str | None = None
    """The engine replica that answers, once it has."""
    counts: ChannelCounts = field(default_factory=ChannelCounts)
    """The receiver's."""
    peer: bytes | None = None
    """Where that replica is on the channel."""
    finished: bool = False
    """The terminal event is here."""
    closed: bool = False
    """Its reader has left."""
    _num_received: int = 0
    _has_gap: bool = False
    _pending: list[Event] = field(default_factory=list)
    _error: Exception | None = None
    _news: asyncio.Future[None] | None = None
    """What the reader waits for; half the cost of an asyncio.Event."""

    @property
    def ended(self) -> bool:
        """Nothing more is taken: the terminal event is here, or will never come, or nobody would read it."""
        return self.finished or self.closed or self._error is not None

    async def take(self) -> list[Event]:
        """Everything that came since the last call; waits until there is something.

        Raises:
            EngineError: the call failed, and all that came before was taken.
            ApiError: the reader was too slow.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        events, self._pending = self._pending, []
        return events

    def receive(self, entry: Entry) -> None:
        """Take a frame's entry. After a lost frame nothing is taken until the call's answer fills the gap."""
        if entry.first > self._num_received and not self._has_gap:
            self._has_gap = True
            self.counts.gaps += 1
        if not self._has_gap:
            self._append(unpack(self.request_id, entry.events[self._num_received - entry.first :]))

    def complete(self, answer: Entry) -> None:
        """Take the whole answer: what the channel has not brought is appended."""
        self.counts.completions += not self.ended
        self._append(unpack(self.request_id, answer.events[self._num_received :]))

    def fail(self, error: Exception) -> None:
        """Nothing more will come. The first reason stands."""
        if not self.ended:
            self._error = error
            self._wake_reader()

    def _append(self, events: Sequence[Event]) -> None:
        if self.ended or not events:
            return
        self._num_received += len(events)
        self._pending += events
        self.finished = isinstance(events[-1], TERMINAL)
        self._wake_reader()
        if len(self._pending) > self.max_unread and not self.finished:
            self._pending.clear()
            self.fail(_too_slow(self.max_unread))

    def _wake_reader(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class TokenReceiver:
    """Hands each call's events to its stream. Belongs to the event loop it was made on."""

    def __init__(self, host: str, max_unread_tokens: int, counts: ChannelCounts | None = None) -> None:
        """Listen on a free port of `host`, an address at which engine replicas reach this process."""
        self._max_unread = max_unread_tokens
        self._counts = counts or ChannelCounts()
        self._context = zmq.asyncio.Context()
        self._socket, self._authenticator, self.address = listen(self._context, host)
        self._streams: dict[int, TokenStream] = {}
        self._ids = itertools.count()
        self._reader = asyncio.ensure_future(self._read())

    def open(self, request_id: str) -> TokenStream:
        """A stream for a call that is about to be made; `close` ends it."""
        stream = TokenStream(request_id, next(self._ids), self._max_unread, counts=self._counts)
        self._streams[stream.stream_id] = stream
        return stream

    def close(self, stream: TokenStream, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Forget the stream. Unless it has finished, tell the engine that nobody reads it, and why: Serve's own
        cancellation of the call is not always delivered, and knows no reason. Idempotent, never blocks.

        Returns:
            Whether the engine is being told.
        """
        stream.closed = True
        if not self._streams.pop(stream.stream_id, None) or stream.finished or stream.peer is None:
            return False
        return self._abort(stream.peer, Abort([stream.stream_id], reason))

    def shutdown(self) -> None:
        self._reader.cancel()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        for num_frames in itertools.count(1):
            peer, *parts = await self._socket.recv_multipart()
            self._counts.frames += 1
            try:
                self._deliver(peer, decode_frame(b"".join(parts)))
            except MalformedFrame as error:
                logger.error("the token channel brought a malformed frame: %s", error)
            if not num_frames % _FRAMES_AT_A_TIME:
                await asyncio.sleep(0)

    def _deliver(self, peer: bytes, frame: Frame) -> None:
        unread = []
        for entry in frame.entries:
            stream = self._streams.get(entry.stream_id)
            if stream is None or stream.ended:
                # Its reader left before the engine was known, or was too slow, or the message that said so was lost.
                unread.append(entry.stream_id)
            else:
                stream.peer, stream.replica_id = peer, frame.replica_id
                stream.receive(entry)
        if unread:
            self._abort(peer, Abort(unread))

    def _abort(self, peer: bytes, abort: Abort) -> bool:
        # If the message is not taken, the streams' next frame gives another occasion.
        return send_now(self._socket, [peer, encode_abort(abort)])


def _too_slow(max_unread: int) -> ApiError:
    text = f"The client does not read its answer: more than {max_unread} tokens wait for it (max_unread_tokens)."
    return ApiError(408, text, type="timeout", code="client_too_slow")
