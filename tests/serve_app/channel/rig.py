"""Owns what tests of the token channel share:
both of its ends with an engine between, a step gate, and a relay that breaks.
Never goes through Ray; the sockets are real ones on 127.0.0.1."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.async_engine import AsyncEngine
from engine.core.core import EngineCore
from engine.fake.executor import FakeExecutor
from engine.protocol import TERMINAL, Event, FinishReason, SamplingParams, Submission, Token
from engine.step import StepPlan
from serve_app.channel import token_sender
from serve_app.channel.frames import Frame, decode_frame, unpack
from serve_app.channel.token_receiver import TokenReceiver, TokenStream
from serve_app.channel.token_sender import TokenSender
from serve_app.engines.engine_call import ChannelAddress, EngineCall
from tests.support.conditions import until
from tests.support.engines import resolved_config

HOST = "127.0.0.1"
TIMEOUT_S = 30  # only ever reached by a failure
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


class Gate:
    """Holds an engine's steps back, and lets it make as many as it is told."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self.plans: list[StepPlan] = []

    def __call__(self, plan: StepPlan) -> None:
        self._steps.acquire()
        self.plans.append(plan)

    def let(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._steps.release()

    def open(self) -> None:
        self._steps.release(100_000)


def engine_of(before_step: Callable[[StepPlan], None] | None, **overrides: Any) -> AsyncEngine:
    config = resolved_config(
        **{"max_num_batched_tokens": 64, "max_prefill_tokens": 64, "num_kv_blocks": 512} | overrides
    )
    executor = FakeExecutor(
        config.num_kv_blocks, config.block_size, range(32), before_step=before_step, verify_prefix=True
    )
    return AsyncEngine(EngineCore(executor, config))


class Call:
    """One call of an engine, as a reader at the ingress sees it."""

    def __init__(
        self,
        sender: TokenSender,
        receiver: TokenReceiver,
        submission: Submission,
        address: ChannelAddress | None = None,
    ) -> None:
        self.receiver = receiver
        self.request_id = submission.request_id
        self.stream: TokenStream = receiver.open(self.request_id)
        call = EngineCall(submission, self.stream.stream_id, address or receiver.address)
        self.answer = asyncio.ensure_future(sender.generate(call))
        self.events: list[Event] = []

    async def read(self, num_events: int) -> None:
        """Take from the stream until so many events are here."""
        while len(self.events) < num_events:
            self.events += await self.stream.take()

    async def read_all(self) -> list[int]:
        """Take from the stream to its end; return the tokens."""
        while not self.events or not isinstance(self.events[-1], TERMINAL):
            self.events += await self.stream.take()
        return self.tokens

    async def complete(self) -> None:
        """Handle the call's answer as the ingress does."""
        self.stream.complete(decode_frame(await self.answer).entries[0])

    async def answered(self) -> list[Event]:
        """Return the events in the call's answer."""
        return unpack(self.request_id, decode_frame(await self.answer).entries[0].events)

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Token)]


class Rig:
    """An engine with its end of the channel, and as many ingresses as a test wants."""

    def __init__(self, gated: bool, **overrides: Any) -> None:
        self.gate = Gate()
        if not gated:
            self.gate.open()
        self.engine = engine_of(self.gate, **overrides)
        self.sender = TokenSender(self.engine, "replica-1")
        self._receivers: list[TokenReceiver] = []
        self._calls: list[Call] = []

    def receiver(self, max_unread: int = 1000) -> TokenReceiver:
        self._receivers.append(TokenReceiver(HOST, max_unread))
        return self._receivers[-1]

    def call(
        self,
        receiver: TokenReceiver,
        request_id: str = "r",
        prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
        sampling: SamplingParams = LONG,
        address: ChannelAddress | None = None,
    ) -> Call:
        self._calls.append(Call(self.sender, receiver, Submission(request_id, prompt, sampling), address))
        return self._calls[-1]

    async def submitted(self, num_requests: int) -> None:
        await until(lambda: len(self.engine._streams) == num_requests)

    async def idle(self) -> None:
        """Wait until the engine holds nothing any more."""
        await until(lambda: not self.engine._streams and not _held(self.engine))

    async def end(self) -> None:
        self.gate.open()
        for receiver in self._receivers:
            receiver.shutdown()
        self.sender.shutdown()
        await asyncio.to_thread(self.engine.shutdown)
        for call in self._calls:
            call.answer.cancel()
        await asyncio.gather(*(call.answer for call in self._calls), return_exceptions=True)


def _held(engine: AsyncEngine) -> int:
    load = engine.load()
    return load.num_running + load.num_waiting + load.num_held_blocks


@asynccontextmanager
async def rig(*, gated: bool = False, **overrides: Any) -> AsyncIterator[Rig]:
    """Make a rig. `gated`: the engine makes only the steps that `gate` allows."""
    made = Rig(gated, **overrides)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield made
    finally:
        await made.end()


@contextmanager
def spied_frames() -> Iterator[list[tuple[Frame, bool]]]:
    """Collect the frames that engines send, each with whether it was accepted."""
    seen: list[tuple[Frame, bool]] = []
    send = token_sender.send_now

    def spy(socket: Any, parts: list[bytes]) -> bool:
        taken = send(socket, parts)
        seen.append((decode_frame(parts[0]), taken))
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_sender, "send_now", spy)
        yield seen


async def handshake_event(socket: Any, endpoint: str) -> int:
    """Connect; return how the handshake ended: the first word of the monitor that decides it."""
    monitor = socket.get_monitor_socket()
    socket.connect(endpoint)
    decisive = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_DISCONNECTED,
    )
    try:
        while (event := (await recv_monitor_message(monitor))["event"]) not in decisive:
            pass
        return int(event)
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


class Relay:
    """A TCP hop from the engine to the ingress that can lose what the engine sends, stall, break, or refuse."""

    def __init__(self, address: ChannelAddress) -> None:
        self._target = int(address.endpoint.rsplit(":", 1)[1])
        self._address = address
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows: list[asyncio.Event] = []
        self.losing = False
        self.holding = False
        self.num_lost_bytes = 0
        self.num_connections = 0

    @property
    def address(self) -> ChannelAddress:
        port = self._server.sockets[0].getsockname()[1]
        return replace(self._address, endpoint=f"tcp://{HOST}:{port}")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        task.add_done_callback(self._tasks.discard)  # type: ignore[union-attr]
        self.num_connections += 1
        flow = asyncio.Event()
        if not self.holding:
            flow.set()
        self._flows.append(flow)
        up_reader, up_writer = await asyncio.open_connection(HOST, self._target)
        self._writers += [writer, up_writer]
        await asyncio.gather(self._pump(reader, up_writer, flow, True), self._pump(up_reader, writer, flow, False))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flow: asyncio.Event, up: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await flow.wait()
                if up and self.losing:
                    self.num_lost_bytes += len(data)
                else:
                    writer.write(data)
        writer.close()

    def freeze(self) -> None:
        """Make existing connections carry nothing any more, without saying so; new ones work."""
        for flow in self._flows:
            flow.clear()

    def hold(self) -> None:
        """Carry nothing from now on, and make new connections wait, too."""
        self.holding = True
        self.freeze()

    def go_on(self) -> None:
        """Carry all that was held, and whatever comes."""
        self.holding = False
        for flow in self._flows:
            flow.set()

    def cut(self) -> None:
        """Break the existing connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def refuse(self) -> None:
        """Accept no new connections."""
        self._server.close()

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def relay_to(address: ChannelAddress) -> AsyncIterator[Relay]:
    relay = Relay(address)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


async def lose_ten_steps(engine: Rig, call: Call, relay: Relay) -> None:
    """Let the events of ten steps arrive and those of ten more get lost, and have the connection replaced."""
    await engine.submitted(1)
    engine.gate.let(10)
    await call.read(11)
    relay.losing = True
    engine.gate.let(10)
    await until(lambda: len(engine.gate.plans) == 20 and relay.num_lost_bytes)
    relay.cut()
    relay.losing = False
    await until(lambda: relay.num_connections >= 2)


def spied_aborts(engine: Rig) -> set[str]:
    """Collect the requests that the engine is told to end from now on."""
    seen: set[str] = set()
    abort = engine.engine.abort

    def spy(request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        seen.add(request_id)
        abort(request_id, reason)

    engine.engine.abort = spy  # type: ignore[method-assign]
    return seen
