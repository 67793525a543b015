"""Contracts of the token channel, from an engine's step to a stream's reader. Long: every way in which an end fails.
Never goes through Ray: the answer with which a call repairs its stream is that of TokenSender.generate."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import (
    TERMINAL,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Token,
    Usage,
)
from serve_app.channel import sockets as channel_socket
from serve_app.channel import token_sender
from serve_app.channel.frames import Entry, Frame, encode_frame, pack
from serve_app.channel.sockets import connect
from serve_app.channel.token_receiver import TokenReceiver, TokenStream
from serve_app.engines.engine_call import ChannelAddress
from serve_app.errors.api_error import ApiError
from tests.serve_app.channel.rig import (
    HOST,
    LONG,
    Call,
    Rig,
    handshake_event,
    lose_ten_steps,
    relay_to,
    rig,
    spied_aborts,
    spied_frames,
)
from tests.support.conditions import until
from tests.support.engines import answer_alone

pytestmark = pytest.mark.anyio

PROMPT = (1, 2, 3, 4, 5)
HEAVY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=20)


def expected(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 100) -> list[int]:
    return answer_alone(prompt, max_tokens=max_tokens, ignore_eos=True)


def prompt_of(index: int) -> tuple[int, ...]:
    return (index + 1, *PROMPT)


# --- tokens that arrive ----------------------------------------------------------------------------------------------


async def test_tokens_come_in_order_with_one_frame_a_step_for_all_streams() -> None:
    with spied_frames() as frames:
        async with rig(gated=True) as engine:
            receiver = engine.receiver()
            calls = [engine.call(receiver, f"r{i}", prompt_of(i)) for i in range(8)]
            await engine.submitted(8)
            engine.gate.open()
            assert [await call.read_all() for call in calls] == [expected(prompt_of(i)) for i in range(8)]
            with_news = [frame for frame, _ in frames if any(entry.events for entry in frame.entries)]
            assert len(with_news) == len(engine.gate.plans)
            assert max(len(frame.entries) for frame, _ in frames) == 8
            await engine.idle()


async def test_a_queued_request_whose_reader_leaves_before_its_first_step_is_ended_through_the_channel() -> None:
    """Serve's cancellation of a call is not always delivered."""
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        aborted = spied_aborts(engine)
        call = engine.call(receiver)
        await until(lambda: call.stream.peer is not None)
        receiver.close(call.stream)
        await until(lambda: aborted == {"r"})
        engine.gate.open()
        answered = await call.answered()
        assert answered[-1] == _aborted(answered)
        await engine.idle()


async def test_the_answer_of_a_call_is_what_came_through_the_channel() -> None:
    async with rig() as engine:
        call = engine.call(engine.receiver(), sampling=replace(HEAVY, prompt_logprobs=2))
        await call.read_all()
        assert await call.answered() == call.events
        assert call.stream.replica_id == "replica-1"


async def test_each_ingress_gets_the_tokens_of_its_own_calls_and_no_others() -> None:
    with spied_frames() as frames:
        async with rig() as engine:
            receivers = [engine.receiver(), engine.receiver()]
            calls = [engine.call(receivers[i % 2], f"r{i}", prompt_of(i)) for i in range(6)]
            assert [await call.read_all() for call in calls] == [expected(prompt_of(i)) for i in range(6)]
        sent = Counter(entry.stream_id for frame, _ in frames for entry in frame.entries for _ in entry.events)
        assert sent == dict.fromkeys(range(3), 2 * 102)


async def test_a_refused_request_leaves_nothing_at_either_end() -> None:
    async with rig() as engine:
        receiver = engine.receiver()
        call = engine.call(receiver, prompt=())
        with pytest.raises(RequestRejected, match="no tokens"):
            await call.answer
        receiver.close(call.stream)
        assert await engine.call(receiver, "next").read_all() == expected()
        await engine.idle()


async def test_one_engine_writes_to_an_ingress_over_one_connection() -> None:
    async with rig() as engine:
        receiver = engine.receiver()
        async with relay_to(receiver.address) as relay:
            for i in range(3):
                await engine.call(receiver, f"r{i}", address=relay.address).read_all()
            assert relay.num_connections == 1


async def test_a_backlog_that_is_read_at_once_ends_no_stream_whose_reader_keeps_up() -> None:
    """Regression: messages that are there are received without a pause, so readers never ran in between,
    and all counted as too slow."""
    receiver = TokenReceiver(HOST, max_unread_tokens=100)
    context = zmq.asyncio.Context()
    socket = connect(context, receiver.address)
    try:
        stream = receiver.open("r")
        events: list[Event] = [Scheduled("r", 0), *(Token("r", i) for i in range(900))]
        events.append(Finished("r", FinishReason.LENGTH, Usage(1, 900, 0)))
        for place, event in enumerate(events):
            frame = Frame("e", [Entry(stream.stream_id, place, [pack(event)])])
            await socket.send(encode_frame(frame))
            if not place:
                taken = await asyncio.wait_for(stream.take(), 20)
        while not stream.finished:
            taken += await asyncio.wait_for(stream.take(), 20)
        assert taken + (stream._pending) == events
    finally:
        context.destroy(linger=0)
        receiver.shutdown()


# --- a channel that breaks -------------------------------------------------------------------------------------------


async def test_frames_lost_with_a_connection_are_noticed_and_the_answer_completes_the_stream_without_repeating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This also holds if nothing that the ingress asks for again ever comes."""
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        monkeypatch.setattr(receiver, "_reply", lambda *what: False)
        async with relay_to(receiver.address) as relay:
            call = engine.call(receiver, address=relay.address)
            await lose_ten_steps(engine, call, relay)
            other = engine.call(receiver, "other", prompt_of(1), address=relay.address)
            await engine.submitted(2)
            engine.gate.open()
            assert await other.read_all() == expected(prompt_of(1)), "the channel goes on"
            await call.answer
            await call.read(11)
            assert not call.stream._pending, "nothing behind the gap is given out before the gap is filled"
            await call.complete()
            assert await call.read_all() == expected()
            assert await call.answered() == call.events
            await engine.idle()


async def test_a_connection_that_says_nothing_is_replaced_and_later_calls_use_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_socket, "HEARTBEAT_MS", 50)
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        async with relay_to(receiver.address) as relay:
            call = engine.call(receiver, address=relay.address)
            await engine.submitted(1)
            engine.gate.let(10)
            await call.read(11)
            relay.freeze()
            await until(lambda: relay.num_connections >= 2)
            engine.gate.open()
            assert await engine.call(receiver, "later", address=relay.address).read_all() == expected()
            await call.complete()
            assert await call.read_all() == expected()


async def test_an_ingress_whose_port_refuses_has_lost_its_requests_at_once() -> None:
    async with rig(gated=True) as engine:
        receiver, other = engine.receiver(), engine.receiver()
        async with relay_to(receiver.address) as relay:
            calls = [engine.call(receiver, f"r{i}", address=relay.address) for i in range(2)]
            call_elsewhere = engine.call(other, "elsewhere")
            await engine.submitted(3)
            engine.gate.let(5)
            await calls[0].read(3)
            relay.refuse()
            relay.cut()
            for call in calls:
                with pytest.raises(EngineError) as caught:
                    await call.answer
                assert caught.value.code is ErrorCode.ENGINE_DEAD
            engine.gate.open()
            assert await call_elsewhere.read_all() == expected()
            await engine.idle()


async def test_an_ingress_that_cannot_be_reached_has_lost_its_requests_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = []

    async def unreachable(*args: Any) -> None:
        attempts.append(args)
        raise OSError(errno.EHOSTUNREACH, "no route to host")

    monkeypatch.setattr(token_sender, "PEER_LOST_S", 0.3)
    monkeypatch.setattr(token_sender, "PROBE_INTERVAL_S", 0.02)
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        async with relay_to(receiver.address) as relay:
            call = engine.call(receiver, address=relay.address)
            await engine.submitted(1)
            engine.gate.let(5)
            await call.read(3)
            monkeypatch.setattr(asyncio, "open_connection", unreachable)
            relay.refuse()
            relay.cut()
            with pytest.raises(EngineError) as caught:
                await call.answer
            assert caught.value.code is ErrorCode.ENGINE_DEAD
            assert len(attempts) > 1
            engine.gate.open()
            await engine.idle()


async def test_an_ingress_that_stops_has_its_requests_ended_and_nothing_is_kept_of_it() -> None:
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        calls = [engine.call(receiver, f"r{i}") for i in range(3)]
        await engine.submitted(3)
        engine.gate.let(4)
        await calls[0].read(3)
        (peer,) = engine.sender._peers.values()
        receiver.shutdown()
        for call in calls:
            with pytest.raises(EngineError):
                await call.answer
        engine.gate.open()
        await engine.idle()
        assert not engine.sender._peers
        assert peer._socket.closed
        assert peer._monitor.closed
        assert await engine.call(engine.receiver(), "next").read_all() == expected()


async def test_events_of_an_ingress_that_is_gone_are_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Steps that were under way when its socket was closed still have events for it."""
    async with rig(gated=True) as engine:
        call = engine.call(engine.receiver())
        engine.gate.let(3)
        await call.read(1)
        (peer,) = engine.sender._peers.values()
        peer.close()
        peer.receive([Token("r", 5)])
        peer.close()
        with pytest.raises(EngineError):
            await call.answer
        engine.gate.open()
        await engine.idle()
    assert "failed to take" not in caplog.text


async def test_an_ingress_on_the_port_of_one_that_is_gone_has_a_connection_of_its_own_and_the_old_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: frames for the new one were sent under the keys of the old one, and never arrived."""
    monkeypatch.setattr(token_sender, "PEER_LOST_S", 0.3)
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        gone = replace(receiver.address, server_key=zmq.curve_keypair()[0])
        old = engine.call(receiver, "old", address=gone)
        new = engine.call(receiver)
        await engine.submitted(2)
        engine.gate.let(5)
        with pytest.raises(EngineError):
            await old.answer
        engine.gate.open()
        assert await new.read_all() == expected()
        assert list(engine.sender._peers) == [receiver.address]


async def test_an_ingress_that_does_not_read_blocks_nobody_and_its_answers_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited = channel_socket._limited

    def tiny(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
        socket.sndbuf = socket.rcvbuf = 4096
        return limited(socket)

    monkeypatch.setattr(channel_socket, "MAX_QUEUED_FRAMES", 2)
    monkeypatch.setattr(channel_socket, "_limited", tiny)
    with spied_frames() as frames:
        async with rig() as engine:
            deaf, other = engine.receiver(), engine.receiver()
            deaf._tasks[0].cancel()
            await until(deaf._tasks[0].done)
            unread = [engine.call(deaf, f"deaf{i}", prompt_of(i), HEAVY) for i in range(4)]
            for call in unread:
                await call.answer
            assert any(not taken for _, taken in frames), "the test did not fill the queue"
            calls = [engine.call(other, f"r{i}", prompt_of(i)) for i in range(4)]
            for i, call in enumerate(calls):
                await call.complete()
                assert await call.read_all() == expected(prompt_of(i))
            for i, call in enumerate(unread):
                await call.complete()
                assert await call.read_all() == expected(prompt_of(i))
            await engine.idle()


# --- strangers -------------------------------------------------------------------------------------------------------


async def _forge(receiver: TokenReceiver, socket: zmq.asyncio.Socket, call: Call) -> None:
    """Offer tokens for a live stream, and see the handshake fail."""
    decided = asyncio.ensure_future(handshake_event(socket, receiver.address.endpoint))
    await asyncio.sleep(0)
    await socket.send(encode_frame(Frame("forged", [Entry(call.stream.stream_id, 0, [7] * 5)])))
    assert await decided != zmq.EVENT_HANDSHAKE_SUCCEEDED


def _keys_of(address: ChannelAddress, who: str) -> dict[str, bytes]:
    public, secret = zmq.curve_keypair()
    return {
        "other client keys": dict(curve_serverkey=address.server_key, curve_publickey=public, curve_secretkey=secret),
        "other server key": dict(
            curve_serverkey=public, curve_publickey=address.public_key, curve_secretkey=address.secret_key
        ),
        "no keys": {},
    }[who]


@pytest.mark.parametrize("who", ["other client keys", "other server key", "no keys"])
async def test_a_peer_without_the_right_keys_is_let_in_by_no_handshake_and_delivers_nothing(who: str) -> None:
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        call = engine.call(receiver)
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.DEALER)
            for name, key in _keys_of(receiver.address, who).items():
                setattr(socket, name, key)
            await _forge(receiver, socket, call)
        finally:
            context.destroy(linger=0)
        engine.gate.open()
        assert await call.read_all() == expected()
        assert call.stream.replica_id == "replica-1"


async def test_a_tcp_client_that_speaks_something_else_is_dropped() -> None:
    async with rig() as engine:
        receiver = engine.receiver()
        port = int(receiver.address.endpoint.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert await engine.call(receiver).read_all() == expected()
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        writer.close()


@pytest.mark.parametrize(
    "parts",
    [[b"\xff\xff"], [b"\x92\xa1\xff\x90"], [b"a", b"b"], [encode_frame(Frame("e", [Entry(0, 0, [[9]])]))], [b""]],
    ids=["no MessagePack", "no UTF-8", "two parts", "no event", "nothing"],
)
async def test_a_malformed_message_of_a_peer_with_the_keys_is_dropped_and_the_channel_goes_on(
    parts: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        call = engine.call(receiver)
        context = zmq.asyncio.Context()
        try:
            socket = connect(context, receiver.address)
            await socket.send_multipart(parts)
            await until(lambda: "malformed" in caplog.text)
        finally:
            context.destroy(linger=0)
        engine.gate.open()
        assert await call.read_all() == expected()


async def test_a_malformed_abort_message_is_dropped_and_the_next_one_counts() -> None:
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        aborted = spied_aborts(engine)
        call = engine.call(receiver)
        await engine.submitted(1)
        engine.gate.let(3)
        await call.read(2)
        assert call.stream.peer is not None
        for data in (b"\xc1", b"\x91\xa1\xff", b"", b"\x91\xa1x"):
            await receiver._socket.send_multipart([call.stream.peer, data])
        receiver.close(call.stream)
        await until(lambda: aborted == {"r"})
        engine.gate.open()
        assert (await call.answered())[-1] == _aborted(await call.answered())


def _aborted(events: list[Event]) -> Event:
    """Return the terminal event of an aborted request."""
    num_tokens = sum(isinstance(event, Token) for event in events)
    return Finished("r", FinishReason.ABORT, Usage(len(PROMPT), num_tokens, 0))


# --- readers that leave ----------------------------------------------------------------------------------------------


async def test_a_frame_for_a_stream_that_nobody_reads_makes_the_engine_abort_its_request() -> None:
    async with rig(gated=True) as engine:
        receiver = engine.receiver()
        call = engine.call(receiver)
        receiver._streams.clear()
        aborted = spied_aborts(engine)
        engine.gate.let(2)
        await until(lambda: aborted == {"r"})
        engine.gate.open()
        last = (await call.answered())[-1]
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.ABORT
        await engine.idle()


STATES = ["before the first frame", "in the queue", "in its prefill", "while it decodes"]


async def _bring(engine: Rig, receiver: TokenReceiver, state: str) -> tuple[Call, list[Call]]:
    """Bring a call to a state of its life; return it, and the calls beside it."""
    others = []
    if state == "in the queue":
        others = [engine.call(receiver, f"other{i}", prompt_of(i)) for i in range(2)]
        await engine.submitted(2)
    prompt = tuple(range(1, 31)) * 3 if state == "in its prefill" else PROMPT
    call = engine.call(receiver, "r", prompt)
    await engine.submitted(len(others) + 1)
    if state in ("in its prefill", "while it decodes"):
        engine.gate.let(4)
        await call.read(1 if state == "in its prefill" else 4)
    elif others:
        engine.gate.let(4)
        await others[0].read(3)
        assert engine.engine.load().num_waiting == 1
    return call, others


@pytest.mark.parametrize("state", STATES)
async def test_closing_a_stream_ends_its_request_and_no_other(state: str) -> None:
    async with rig(gated=True, max_num_seqs=2, max_num_batched_tokens=8, max_prefill_tokens=8) as engine:
        receiver = engine.receiver()
        aborted = spied_aborts(engine)
        call, others = await _bring(engine, receiver, state)
        receiver.close(call.stream)
        receiver.close(call.stream)
        assert not any(call.stream is stream for stream in receiver._streams.values())
        await until(lambda: aborted == {"r"})
        engine.gate.open()
        last = (await call.answered())[-1]
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.ABORT
        for i, other in enumerate(others):
            assert await other.read_all() == expected(prompt_of(i))
        await engine.idle()


@pytest.mark.parametrize("state", STATES)
async def test_cancelling_a_call_ends_its_request_and_no_other(state: str) -> None:
    async with rig(gated=True, max_num_seqs=2, max_num_batched_tokens=8, max_prefill_tokens=8) as engine:
        receiver = engine.receiver()
        call, others = await _bring(engine, receiver, state)
        call.answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.answer
        engine.gate.open()
        for i, other in enumerate(others):
            assert await other.read_all() == expected(prompt_of(i))
        await engine.idle()
        assert len(engine.gate.plans) < (150 if others else 60), "the engine kept computing for a reader that had left"
        (peer,) = engine.sender._peers.values()
        assert not peer._calls
        assert not peer._request_ids


async def test_closing_a_finished_stream_aborts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as engine:
        receiver = engine.receiver()
        call = engine.call(receiver)
        await call.read_all()
        sent: list[object] = []
        monkeypatch.setattr(receiver, "_reply", lambda *what: sent.append(what))
        receiver.close(call.stream)
        assert not sent
        assert not receiver._streams


async def test_a_reader_that_is_too_slow_loses_its_stream_and_only_that() -> None:
    async with rig(gated=True) as engine:
        receiver = engine.receiver(max_unread=20)
        slow, other = engine.call(receiver, "r"), engine.call(receiver, "other", prompt_of(1))
        await engine.submitted(2)
        aborted = spied_aborts(engine)
        engine.gate.let(1)  # the first step may have been planned before the second request came
        while not (other.events and isinstance(other.events[-1], TERMINAL)):
            engine.gate.let(1)
            await other.read(len(other.events) + 1)
        assert other.tokens == expected(prompt_of(1))
        await until(lambda: aborted == {"r"})
        engine.gate.open()
        with pytest.raises(ApiError) as caught:
            await slow.stream.take()
        assert caught.value.status == 408
        answered = await slow.answered()
        assert answered[-1] == _aborted(answered)
        assert len(answered) < 80, "the engine kept computing for a reader that had left"
        await engine.idle()


async def test_an_engine_that_dies_fails_the_streams_of_every_ingress() -> None:
    async with rig(gated=True) as engine:
        calls = [engine.call(engine.receiver(), f"r{i}") for i in range(2)]
        await engine.submitted(2)
        engine.gate.let(5)
        for call in calls:
            await call.read(3)
        ending = asyncio.ensure_future(asyncio.to_thread(engine.engine.shutdown))
        await until(lambda: engine.engine._stopping)
        engine.gate.let(1)
        for call in calls:
            await call.read_all()
            assert isinstance(call.events[-1], Failed)
            assert call.events[-1].code is ErrorCode.ENGINE_DEAD
        await ending


# --- one stream, whatever comes --------------------------------------------------------------------------------------

SENT: list[Event] = [Scheduled("r", 0), *(Token("r", 100 + i) for i in range(12))]
SENT.append(Finished("r", FinishReason.LENGTH, Usage(5, 12, 0)))
RAW = [pack(event) for event in SENT]
FRAME = st.tuples(st.integers(0, len(RAW) - 1), st.integers(0, len(RAW)))
IN_ORDER = st.lists(st.integers(0, len(RAW)), max_size=12).map(lambda cuts: sorted({0, *cuts, len(RAW)}))


def _entry(first: int, end: int) -> Entry:
    return Entry(0, first, RAW[first:end])


def _taken(stream: TokenStream) -> list[Event]:
    """Take what is there, without waiting."""
    return asyncio.run(stream.take()) if stream._pending else []


@settings(deadline=None)
@given(st.lists(st.none() | FRAME, max_size=25), st.integers(0, 25))
def test_a_stream_gives_each_event_once_and_in_order_whatever_frames_come(
    steps: list[tuple[int, int] | None], answered_after: int
) -> None:
    """None stands for a reader that takes. Frames may be cut, duplicated, overlapping, lost or in any order,
    with the answer in between."""
    stream = TokenStream("r", 0, 1000)
    taken: list[Event] = []
    for place, step in enumerate([*steps, *[None] * (answered_after + 1 - len(steps))]):
        if place == answered_after:
            stream.complete(_entry(0, len(RAW)))
        if step is None:
            taken += _taken(stream)
        else:
            stream.receive(_entry(step[0], step[0] + step[1]))
    taken += _taken(stream)
    stream.complete(_entry(0, len(RAW)))
    taken += _taken(stream)
    assert taken == SENT
    assert stream.finished


@settings(deadline=None)
@given(IN_ORDER, st.data())
def test_a_stream_without_lost_frames_needs_no_answer(cuts: list[int], data: st.DataObject) -> None:
    stream = TokenStream("r", 0, 1000)
    for first, end in itertools.pairwise(cuts):
        again = data.draw(st.integers(0, first))  # of what came before
        stream.receive(_entry(again, end))
    assert stream.finished
    assert _taken(stream) == SENT


async def test_a_reader_is_woken_once_for_events_that_come_together() -> None:
    stream = TokenStream("r", 0, 1000)
    items: list[list[Event]] = []

    async def read() -> None:
        while not stream.finished or stream._pending:
            items.append(await stream.take())

    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    stream.receive(_entry(0, 3))
    stream.receive(_entry(3, 5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stream.receive(_entry(5, len(RAW)))
    await asyncio.wait_for(reader, 20)
    assert items == [SENT[:5], SENT[5:]]


async def test_a_failed_stream_gives_what_came_before_and_then_its_first_error_for_ever() -> None:
    stream = TokenStream("r", 0, 1000)
    stream.receive(_entry(0, 4))
    stream.fail(EngineError(ErrorCode.ENGINE_DEAD, "first"))
    stream.fail(EngineError(ErrorCode.ENGINE_DEAD, "second"))
    stream.receive(_entry(4, 6))
    stream.complete(_entry(0, len(RAW)))
    assert await stream.take() == SENT[:4]
    for _ in range(2):
        with pytest.raises(EngineError, match="first"):
            await stream.take()


async def test_a_stream_that_failed_while_its_reader_waited_wakes_it() -> None:
    stream = TokenStream("r", 0, 1000)
    reader = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    stream.fail(EngineError(ErrorCode.ENGINE_DEAD, "gone"))
    with pytest.raises(EngineError, match="gone"):
        await asyncio.wait_for(reader, 20)


async def test_the_last_events_of_an_answer_are_never_too_many() -> None:
    stream = TokenStream("r", 0, max_unread=3)
    stream.complete(_entry(0, len(RAW)))
    assert await stream.take() == SENT
    assert LONG.max_tokens == 100
