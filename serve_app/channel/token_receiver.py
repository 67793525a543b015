"""Implements the ingress replica's end of the token channel: one socket, to which every engine replica connects. Long,
because it has the events that come in, the replies, and the reaction to silence.
Never waits for a reader: one that leaves too many events untaken loses its stream, without effect on other streams."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import zmq.asyncio

from engine.protocol import TERMINAL, EngineError, ErrorCode, Event, FinishReason
from serve_app.channel.frames import (
    Beat,
    Entry,
    Frame,
    MalformedFrame,
    Reply,
    decode_frame,
    encode_reply,
    unpack,
    unpack_times,
)
from serve_app.channel.silence import LOOK_S, Silence
from serve_app.channel.sockets import listen, send_now
from serve_app.engines import liveness, versions
from serve_app.errors.api_error import ApiError
from serve_app.metrics.channel_counts import ChannelCounts
from serve_app.settings.engine_names import ENGINE

logger = logging.getLogger(__name__)

_FRAMES_AT_A_TIME = 32
"""Waiting messages are received without a pause; after this many, the readers of the streams get a turn."""


@dataclass(slots=True, eq=False)
class TokenStream:
    """The events of one call, in order and once each, from the channel or from the call's own answer."""

    request_id: str
    stream_id: int
    max_unread: int
    """The most events that may wait for the reader."""
    replica_id: str | None = None
    """The engine replica that answers, once it has answered."""
    counts: ChannelCounts = field(default_factory=ChannelCounts)
    """The receiver's counts."""
    deployment: str = ENGINE
    """The deployment of the engines."""
    peer: bytes | None = None
    """That replica's identity on the channel."""
    finished: bool = False
    """Whether the terminal event has come."""
    closed: bool = False
    """Whether the reader has left."""
    may_move: bool = False
    """Whether the stream can continue at another engine replica when its own is silent."""
    _num_received: int = 0
    _has_gap: bool = False
    _pending: list[Event] = field(default_factory=list)
    _error: Exception | None = None
    _news: asyncio.Future[None] | None = None
    """The future that the reader waits for; it costs half as much as an asyncio.Event."""

    @property
    def engine(self) -> str | None:
        """The replica that answers, or to which the call was sent; None while the call has no replica yet."""
        return self.replica_id or liveness.placed_at(self.stream_id, self.deployment)

    @property
    def missing(self) -> tuple[int, int] | None:
        """The stream's id and the index of the first lost event, to ask for again; None if nothing was lost."""
        return (self.stream_id, self._num_received) if self._has_gap and not self.ended else None

    @property
    def ended(self) -> bool:
        """Whether no more events are taken: the terminal event has come, or will never come, or has no reader."""
        return self.finished or self.closed or self._error is not None

    async def take(self) -> list[Event]:
        """Return everything that came since the last call; wait until there is something.

        Raises:
            EngineError: the call failed, and all earlier events were taken.
            ApiError: the reader was too slow.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        events, self._pending = self._pending, []
        return events

    def receive(self, entry: Entry) -> bool:
        """Take a frame's entry. After a lost frame nothing is taken until the gap is filled, by an entry that begins
        where the gap does, or by the call's answer.

        Returns:
            Whether this entry revealed a new gap.
        """
        if entry.first > self._num_received:
            is_news, self._has_gap = not self._has_gap, True
            self.counts.gaps += is_news
            return is_news
        self._has_gap = False
        self._append(self._unpacked(entry, self._num_received - entry.first))
        return False

    def complete(self, answer: Entry) -> None:
        """Take the whole answer, and append the events that the channel has not brought."""
        self.counts.completions += not self.ended
        self._append(self._unpacked(answer, self._num_received))

    def _unpacked(self, entry: Entry, first: int) -> list[Event]:
        events = unpack(self.request_id, entry.events[first:])
        if events and entry.times is not None and isinstance(last := events[-1], TERMINAL):
            events[-1] = replace(last, times=unpack_times(entry.times))
        return events

    def fail(self, error: Exception) -> None:
        """Note that nothing more will come. Only the first error counts."""
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
    """Passes each call's events to its stream. Must be used on the event loop on which it was made."""

    def __init__(
        self,
        host: str,
        max_unread_tokens: int,
        counts: ChannelCounts | None = None,
        *,
        engine_silence_s: float = math.inf,
        deployment: str = ENGINE,
    ) -> None:
        """Listen on a free port of `host`, an address at which the replicas of an engine `deployment` reach this
        process. When an engine is silent for `engine_silence_s`, its streams fail, if they may move and there is
        another engine."""
        self._deployment = deployment
        self._max_unread = max_unread_tokens
        self._silence = Silence(engine_silence_s)
        self._counts = counts or ChannelCounts()
        self._context = zmq.asyncio.Context()
        self._socket, self._authenticator, self.address = listen(self._context, host)
        self._streams: dict[int, TokenStream] = {}
        self._ids = itertools.count()
        self._tasks = (asyncio.ensure_future(self._read()), asyncio.ensure_future(self._watch()))

    def open(self, request_id: str, *, may_move: bool = False) -> TokenStream:
        """Open a stream for a call that is about to be made; `close` ends it."""
        stream = TokenStream(
            request_id,
            next(self._ids),
            self._max_unread,
            counts=self._counts,
            may_move=may_move,
            deployment=self._deployment,
        )
        self._streams[stream.stream_id] = stream
        liveness.open_call(stream.stream_id, self._deployment)
        return stream

    def close(self, stream: TokenStream, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Forget the stream. Unless it has finished, tell the engine that it has no reader, and why: Serve's own
        cancellation of the call is not always delivered, and gives no reason. Idempotent; never blocks.

        Returns:
            Whether the message to the engine was sent.
        """
        stream.closed = True
        liveness.close_call(stream.stream_id, self._deployment)
        if not self._streams.pop(stream.stream_id, None) or stream.finished or stream.peer is None:
            return False
        return self._reply(stream.peer, Reply([stream.stream_id], reason))

    @property
    def unheard(self) -> frozenset[str]:
        """The engine replicas that the router knows, but that do not beat here."""
        return liveness.engines(self._deployment) - (self._silence.known - self._silence.silent)

    def shutdown(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        for num_frames in itertools.count(1):
            peer, *parts = await self._socket.recv_multipart()
            try:
                frame = decode_frame(b"".join(parts))
                if frame.beat is None:
                    self._silence.heard(frame.replica_id)
                    self._deliver(peer, frame)
                else:
                    self._take_beat(peer, frame.replica_id, frame.beat)
            except MalformedFrame as error:
                logger.error("the token channel brought a malformed frame: %s", error)
            if not num_frames % _FRAMES_AT_A_TIME:
                await asyncio.sleep(0)

    def _deliver(self, peer: bytes, frame: Frame) -> None:
        self._counts.frames += 1
        unread: list[int] = []
        missing: list[tuple[int, int]] = []
        for entry in frame.entries:
            stream = self._streams.get(entry.stream_id)
            if stream is None or stream.ended:
                # Its reader left before the engine was known, or was too slow, or the message about it was lost.
                unread.append(entry.stream_id)
            else:
                stream.peer, stream.replica_id = peer, frame.replica_id
                if stream.receive(entry) and stream.missing:
                    missing.append(stream.missing)
        self._correct(peer, unread, missing)

    def _take_beat(self, peer: bytes, engine: str, beat: Beat) -> None:
        """Compare the calls that the engine runs for this ingress with the streams. Some may have no reader any more,
        and some may lack a frame: earlier messages about that may be lost, for example if the engine was cut off."""
        self._silence.heard(engine, beat.is_late)
        streams = [(stream_id, self._streams.get(stream_id)) for stream_id in beat.stream_ids]
        unread = [stream_id for stream_id, stream in streams if stream is None or stream.ended]
        missing = [stream.missing for _, stream in streams if stream is not None and stream.missing]
        for _, stream in streams:
            if stream is not None:
                stream.peer = peer  # the identity changes with each reconnection
        self._correct(peer, unread, missing)

    def _correct(self, peer: bytes, unread: list[int], missing: list[tuple[int, int]]) -> None:
        if unread or missing:
            self._reply(peer, Reply(unread, missing=missing))

    def _reply(self, peer: bytes, reply: Reply) -> bool:
        # If the message is not taken, the next frame or beat triggers another.
        return send_now(self._socket, [peer, encode_reply(reply)])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Find the silent engines, let the router avoid them, and let their streams continue elsewhere."""
        expected = liveness.engines_with_calls(self._deployment)
        for engine in expected:
            self._silence.expect(engine)
        self._silence.look()
        self._silence.keep(liveness.engines(self._deployment) | expected)
        silent, before = self._silence.silent, liveness.silent_engines(self._deployment)
        if silent != before:
            _log_changes(silent - before, before - silent)
            liveness.set_silent_engines(silent, self._deployment)
        heard = liveness.engines(self._deployment) - silent
        left = {engine for engine in silent if self._may_continue(engine, heard)}
        for stream in list(self._streams.values()) if left else ():
            if stream.may_move and stream.engine in left:
                stream.fail(EngineError(ErrorCode.ENGINE_DEAD, "The engine replica is silent."))

    def _may_continue(self, engine: str, others: Iterable[str]) -> bool:
        """Whether streams of an engine may go on at one of the others. If not, they can only wait."""
        return any(versions.may_continue(engine, other, self._deployment) for other in others)


def _log_changes(fallen_silent: frozenset[str], back: frozenset[str]) -> None:
    for engine in fallen_silent:
        logger.warning("engine replica %s is silent: it gets no new requests, and its streams move", engine)
    for engine in back:
        logger.warning("engine replica %s is not silent any more", engine)


def _too_slow(max_unread: int) -> ApiError:
    text = f"The client does not read its answer: more than {max_unread} tokens wait for it (max_unread_tokens)."
    return ApiError(408, text, type="timeout", code="client_too_slow")
