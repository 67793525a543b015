"""Implements the engine replica's end of the token channel: a connection to each ingress replica that calls, with one
frame per step. Long, because it has the events that go out, the replies, and the detection of a lost ingress.
Never waits for an ingress: what it cannot take now is sent when it asks, or with the answer of the call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from engine.async_engine import AsyncEngine
from engine.protocol import TERMINAL, EngineError, EngineTimes, ErrorCode, Event, TimeCause
from serve_app.channel.frames import (
    Beat,
    Entry,
    Frame,
    MalformedFrame,
    RawEvent,
    Reply,
    decode_reply,
    encode_frame,
    pack,
    pack_times,
)
from serve_app.channel.sockets import connect, send_now
from serve_app.engines.engine_call import ChannelAddress, EngineCall

logger = logging.getLogger(__name__)

Observe = Callable[[list[Event]], None]

BEAT_S = 0.2
PROBE_INTERVAL_S = 0.2
PEER_LOST_S = 10.0
"""The requests of an ingress that cannot be reached for this long are ended; if its port is closed, at once."""


@dataclass(slots=True, eq=False)
class _Call:
    stream_id: int
    ended: asyncio.Future[None]
    """Done when the terminal event has come."""
    events: list[RawEvent] = field(default_factory=list)
    num_sent: int = 0
    times: EngineTimes | None = None
    """Where its time went, once the terminal event has come."""

    def entry(self, first: int) -> Entry:
        """Make the entry of the events from `first` on."""
        return Entry(self.stream_id, first, self.events[first:], None if self.times is None else pack_times(self.times))


class TokenSender:
    """Runs calls on an engine. Must be used on a single event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        replica_id: str,
        observe: Observe = lambda events: None,
        *,
        patience_s: float = math.inf,
    ) -> None:
        """`observe` gets each step's events of these calls. `patience_s`: how long a step may take before ingress
        replicas are informed that it is late."""
        self._engine = engine
        self._replica_id = replica_id
        self._observe = observe
        self._patience_s = patience_s
        self._beats: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._peers: dict[ChannelAddress, _Peer] = {}  # keys included: a port may be another ingress's later

    async def generate(self, call: EngineCall) -> bytes:
        """Run a request to its end. Its events go through the channel as they come, and all of them are returned as a
        frame with one entry.

        Cancelling this call, or a reply through the channel, aborts the request.

        Raises:
            RequestRejected: the engine refuses the request.
            EngineError: the engine is dead, or the ingress went away.
        """
        self.attach(call.channel)  # the ingress gets beats from now on, however long the rest takes
        spent = await self._engine.make_ready(call.submission)
        return await self.attach(call.channel).run(call, spent)

    def attach(self, address: ChannelAddress) -> _Peer:
        """Send beats to the ingress replica at an address until it is gone. Idempotent."""
        peer = self._peers.get(address)
        if peer is None or peer.lost.done():
            peer = self._peers[address] = _Peer(self._context, address, self._engine, self._replica_id, self._observe)
            peer.lost.add_done_callback(lambda _: self._forget(peer))
            peer.beat(self._engine.is_late(self._patience_s))
        if self._beats is None:
            self._beats = asyncio.ensure_future(self._beat())
        return peer

    async def _beat(self) -> None:
        """Send beats. Runs on the loop that sends tokens, so that beats stop when tokens would; a step blocks
        neither."""
        while True:
            await asyncio.sleep(BEAT_S)
            is_late = self._engine.is_late(self._patience_s)
            for peer in list(self._peers.values()):
                peer.beat(is_late)

    def fail(self, error: EngineError) -> None:
        """End every call, because the engine will not."""
        for peer in self._peers.values():
            peer.fail(error)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]

    def shutdown(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
        for peer in list(self._peers.values()):
            peer.close()
        self._context.destroy(linger=0)


class _Peer:
    """Sends to one ingress replica, as the sink of all its requests. `lost` is done when the ingress is gone for
    good."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: ChannelAddress,
        engine: AsyncEngine,
        replica_id: str,
        observe: Observe,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self.address = address
        self._engine = engine
        self._replica_id = replica_id
        self._observe = observe
        self._calls: dict[str, _Call] = {}  # by request id
        self._request_ids: dict[int, str] = {}  # by stream id
        self._socket = connect(context, address)
        self._monitor = self._socket.get_monitor_socket()
        self._tasks = (asyncio.ensure_future(self._read_replies()), asyncio.ensure_future(self._watch()))

    async def run(self, call: EngineCall, spent: Mapping[TimeCause, float]) -> bytes:
        """`spent`: what making the engine ready for the call took."""
        request_id = call.submission.request_id
        self._engine.submit(call.submission, self, spent)
        live = self._calls[request_id] = _Call(call.stream_id, self.loop.create_future())
        self._request_ids[call.stream_id] = request_id
        if not self.lost.done():
            self._send([live])  # no events yet, but now the ingress knows which engine to tell if its client leaves
        try:
            await live.ended
        except BaseException:
            self._engine.abort(request_id)
            raise
        finally:
            del self._calls[request_id], self._request_ids[call.stream_id]
        return encode_frame(Frame(self._replica_id, [live.entry(0)]))

    def receive(self, events: list[Event]) -> None:
        """Take the events of all requests of this ingress; called once per step."""
        changed: dict[int, _Call] = {}
        for event in events:
            if call := self._calls.get(event.request_id):  # otherwise it was cancelled
                call.events.append(pack(event))
                changed[call.stream_id] = call
                if isinstance(event, TERMINAL):
                    call.times = event.times
                    if not call.ended.done():
                        call.ended.set_result(None)
        if changed and not self.lost.done():
            self._send(changed.values())
        self._observe(events)

    def _send(self, calls: Iterable[_Call]) -> None:
        entries = []
        for call in calls:
            entries.append(call.entry(call.num_sent))
            call.num_sent = len(call.events)
        # If the frame is not taken, the ingress sees the gap later, and asks for the events.
        send_now(self._socket, [encode_frame(Frame(self._replica_id, entries))])

    def beat(self, is_late: bool) -> None:
        if not self.lost.done():
            frame = Frame(self._replica_id, [], Beat(is_late, list(self._request_ids)))
            send_now(self._socket, [encode_frame(frame)])

    async def _read_replies(self) -> None:
        while True:
            try:
                self._take(decode_reply(await self._socket.recv()))
            except MalformedFrame as error:
                logger.error("the token channel brought a malformed message: %s", error)

    def _take(self, reply: Reply) -> None:
        for request_id in filter(None, map(self._request_ids.get, reply.unread)):
            self._engine.abort(request_id, reply.reason)
        for stream_id, first in reply.missing:
            if call := self._calls.get(self._request_ids.get(stream_id, "")):
                call.num_sent = max(min(call.num_sent, first), 0)
                self._send([call])

    async def _watch(self) -> None:
        """Watch the connection, and end the requests of an ingress that is gone: Ray does not cancel a dead process's
        calls."""
        broken_since: float | None = None
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                broken_since = None
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED):
                broken_since = broken_since or self.loop.time()
                # A port that takes connections, but not these keys, belongs to another process by now.
                if self.loop.time() - broken_since > PEER_LOST_S or not await self._is_reachable():
                    break
        logger.warning("ingress at %s is gone; ending its %d requests", self.address.endpoint, len(self._calls))
        self.close()

    async def _is_reachable(self) -> bool:
        """Whether the ingress still accepts connections; ZeroMQ then reconnects by itself."""
        url = urlsplit(self.address.endpoint)
        deadline = self.loop.time() + PEER_LOST_S
        while self.loop.time() < deadline:
            try:
                async with asyncio.timeout(PEER_LOST_S):
                    _, writer = await asyncio.open_connection(url.hostname, url.port)
            except ConnectionRefusedError:
                return False
            except OSError:  # not reachable now; includes TimeoutError
                await asyncio.sleep(PROBE_INTERVAL_S)
            else:
                writer.close()
                return True
        return False

    def close(self) -> None:
        if self.lost.done():
            return
        self.lost.set_result(None)
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        text = "The ingress replica cannot be reached through the token channel."
        self.fail(EngineError(ErrorCode.ENGINE_DEAD, text))

    def fail(self, error: EngineError) -> None:
        """End the calls that have not ended, and abort their requests."""
        for call in self._calls.values():
            if not call.ended.done():
                call.ended.set_exception(error)
