"""Contracts of what follows when an engine falls silent. Long: each way to be so.
Its streams move, it gets nothing new, and once it is back it computes for nobody.
Never waits for real patience to run out: a test makes the receiver look as often as it wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from engine.protocol import EngineError, ErrorCode, Event, Submission, Token
from serve_app.channel import migration, roll_call, token_receiver, token_sender
from serve_app.channel import sockets as channel_socket
from serve_app.channel.handle_client import HandleClient
from serve_app.channel.migration import Migration
from serve_app.channel.roll_call import call_the_roll
from serve_app.channel.silence import LOOK_S
from serve_app.channel.token_receiver import TokenReceiver
from serve_app.engines import liveness, versions
from serve_app.engines.engine_call import ChannelAddress, EngineCall
from serve_app.engines.versions import EngineVersion
from tests.serve_app.channel.rig import HOST, LONG, Relay, Rig, lose_ten_steps, relay_to, rig, spied_aborts
from tests.support.conditions import until
from tests.support.engines import answer_alone

pytestmark = pytest.mark.anyio

PROMPT = (1, 2, 3, 4, 5)
EXPECTED = answer_alone(PROMPT, max_tokens=100, ignore_eos=True)
MOST_LOOKS = 20
FIRST, SECOND = "replica-1", "replica-2"


@pytest.fixture(autouse=True)
def looked_at_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody look but the test, make beats frequent, and let the process know two engines."""
    monkeypatch.setattr(token_receiver, "LOOK_S", 3600)
    monkeypatch.setattr(token_sender, "BEAT_S", 0.01)
    monkeypatch.setattr(migration, "FIRST_BACKOFF_S", 0)
    monkeypatch.setattr(liveness, "_deployments", {})
    liveness.set_engines(frozenset({FIRST, SECOND}))


def receiver_of(engine: Rig) -> TokenReceiver:
    engine._receivers.append(TokenReceiver(HOST, 1000, engine_silence_s=MOST_LOOKS * LOOK_S))
    return engine._receivers[-1]


def look(receiver: TokenReceiver, times: int) -> frozenset[str]:
    """Look so many times: what would happen in as many tenths of a second in which nothing came."""
    for _ in range(times):
        receiver.look()
    return liveness.silent_engines()


class Beats:
    """The beats that a receiver hears from now on: for each, whether the engine said that it is late."""

    def __init__(self, receiver: TokenReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.late: list[bool] = []
        heard = receiver._silence.heard

        def spy(engine: str, is_late: bool | None = None) -> None:
            if is_late is not None:
                self.late.append(is_late)
            heard(engine, is_late)

        monkeypatch.setattr(receiver._silence, "heard", spy)

    async def more(self, count: int = 3) -> None:
        least = len(self.late) + count
        await until(lambda: len(self.late) >= least)


# --- beats -----------------------------------------------------------------------------------------------------------


async def test_an_engine_beats_while_its_step_runs_and_a_long_step_is_not_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(gated=True) as engine:
        receiver = receiver_of(engine)
        beats = Beats(receiver, monkeypatch)
        call = engine.call(receiver)
        await engine.submitted(1)
        engine.gate.let(3)
        await call.read(4)
        for _ in range(3):
            await beats.more()
            assert look(receiver, MOST_LOOKS) == set()
        assert not any(beats.late)
        engine.gate.open()
        assert await call.read_all() == EXPECTED


async def test_an_engine_without_work_beats_for_every_ingress_that_has_attached_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as engine:
        receiver = receiver_of(engine)
        assert receiver.unheard == {FIRST, SECOND}
        beats = Beats(receiver, monkeypatch)
        engine.sender.attach(receiver.address)
        engine.sender.attach(receiver.address)
        await beats.more()
        receiver.look()
        assert receiver.unheard == {SECOND}
        assert len(engine.sender._peers) == 1


async def test_a_step_that_may_never_return_is_reported_by_a_beat_and_its_streams_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(gated=True) as engine:
        engine.sender._patience_s = 0.001
        receiver = receiver_of(engine)
        beats = Beats(receiver, monkeypatch)
        call = engine.call(receiver)
        call.stream.may_move = True
        await until(lambda: any(beats.late))
        assert look(receiver, 1) == {FIRST}
        with pytest.raises(EngineError, match="silent") as caught:
            await call.read_all()
        assert caught.value.code is ErrorCode.ENGINE_DEAD
        receiver.close(call.stream)
        engine.gate.open()
        await engine.idle()
        await until(lambda: not beats.late[-1])
        assert look(receiver, 1) == set(), "it may be used again"


async def test_an_engine_with_images_is_late_only_when_it_has_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder's first large image takes longer than any step before it."""
    async with rig(gated=True) as engine:
        engine.call(receiver_of(engine))
        await until(lambda: engine.engine.is_late(0.001))
        monkeypatch.setattr(engine.engine, "config", replace(engine.engine.config, inputs=(object(),)))
        assert not engine.engine.is_late(0.001)
        monkeypatch.setattr(engine.engine, "config", replace(engine.engine.config, stall_timeout_s=0.001))
        assert engine.engine.is_late(0.001)


# --- who moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("may_move", "engines"),
    [
        pytest.param(False, {FIRST, SECOND}, id="it has moved as often as it may"),
        pytest.param(True, {FIRST}, id="there is no other engine"),
        pytest.param(True, set(), id="no engine is known"),
    ],
)
async def test_a_stream_that_has_nowhere_to_go_waits_for_its_engine(may_move: bool, engines: set[str]) -> None:
    async with rig(gated=True) as engine:
        receiver = receiver_of(engine)
        liveness.set_engines(frozenset(engines))
        async with relay_to(receiver.address) as relay:
            call = engine.call(receiver, address=relay.address)
            call.stream.may_move = may_move
            await engine.submitted(1)
            engine.gate.let(1)
            await call.read(2)
            relay.hold()
            look(receiver, 3 * MOST_LOOKS)
            relay.go_on()
            engine.gate.open()
            assert await call.read_all() == EXPECTED


async def test_a_call_that_its_engine_never_heard_of_fails_too() -> None:
    """The router has sent the call to an engine that hangs, and nothing has ever come from there."""
    async with rig() as engine:
        receiver = receiver_of(engine)
        stream = receiver.open("r", may_move=True)
        assert look(receiver, 3 * MOST_LOOKS) == set(), "it still looks for an engine, which may take any time"
        liveness.place_call(stream.stream_id, SECOND)
        assert look(receiver, MOST_LOOKS) == set()
        assert look(receiver, 1) == {SECOND}
        with pytest.raises(EngineError, match="silent"):
            await stream.take()
        receiver.close(stream)
        assert not liveness.engines_with_calls()


@pytest.mark.parametrize(("files", "ended"), [("f", True), ("g", False)])
async def test_a_stream_of_a_silent_engine_moves_only_if_another_has_the_same_files(
    files: str, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_deployments", {})
    versions.tell(FIRST, EngineVersion("m", "s", "f"))
    versions.tell(SECOND, EngineVersion("m", "s", files))
    async with rig() as engine:
        receiver = receiver_of(engine)
        stream = receiver.open("r", may_move=True)
        liveness.place_call(stream.stream_id, FIRST)
        assert look(receiver, 2 * MOST_LOOKS) == {FIRST}
        assert stream.ended is ended
        receiver.close(stream)


async def test_whether_streams_may_move_is_asked_once_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked for each stream, ten times a second: thousands of streams took a tenth of the ingress's time."""
    asked = 0
    may_continue = versions.may_continue

    def spy(begun_at: str, engine_id: str, deployment: str) -> bool:
        nonlocal asked
        asked += 1
        return may_continue(begun_at, engine_id, deployment)

    monkeypatch.setattr(versions, "_deployments", {})
    monkeypatch.setattr(versions, "may_continue", spy)
    versions.tell(FIRST, EngineVersion("m", "s", "f"))
    versions.tell(SECOND, EngineVersion("m", "s", "g"))
    async with rig() as engine:
        receiver = receiver_of(engine)
        streams = [receiver.open(f"r{number}", may_move=True) for number in range(100)]
        for stream in streams:
            liveness.place_call(stream.stream_id, FIRST)
        look(receiver, 2 * MOST_LOOKS)
        asked = 0
        assert look(receiver, 3) == {FIRST}
        assert asked == 3
        for stream in streams:
            assert not stream.ended
            receiver.close(stream)


async def test_the_silence_of_one_models_engines_is_no_concern_of_anothers() -> None:
    """Each model's end of the channel numbers its calls by itself, and expects no engine of another deployment."""
    other = TokenReceiver(HOST, 1000, engine_silence_s=MOST_LOOKS * LOOK_S, deployment="Engine-b")
    async with rig() as engine:
        receiver = receiver_of(engine)
        liveness.set_engines(frozenset({"b1", "b2"}), "Engine-b")
        stream, others = receiver.open("r", may_move=True), other.open("r", may_move=True)
        assert stream.stream_id == others.stream_id
        liveness.place_call(stream.stream_id, FIRST)
        for _ in range(2 * MOST_LOOKS):
            receiver.look()
            other.look()
        assert liveness.silent_engines() == {FIRST}
        assert liveness.silent_engines("Engine-b") == set()
        assert (stream.ended, others.ended) == (True, False)
        assert other.unheard == {"b1", "b2"}
        other.close(others)
        receiver.close(stream)
    other.shutdown()


async def test_when_no_engine_is_heard_of_all_streams_wait_and_the_first_that_is_heard_takes_them() -> None:
    async with rig() as engine:
        receiver = receiver_of(engine)
        streams = [receiver.open(f"r{i}", may_move=True) for i in range(2)]
        for stream, name in zip(streams, (FIRST, SECOND), strict=True):
            liveness.place_call(stream.stream_id, name)
        assert look(receiver, 2 * MOST_LOOKS) == {FIRST, SECOND}
        assert not any(stream.ended for stream in streams)
        receiver._silence.heard(SECOND)
        look(receiver, 1)
        assert [stream.ended for stream in streams] == [True, False]


# --- from one engine to the other ------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two engines behind one ingress, the first through a relay; calls go to the first that is not silent."""

    engines: tuple[Rig, Rig]
    receiver: TokenReceiver
    relay: Relay
    calls: list[EngineCall] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def generate(self) -> Pair:
        return self

    def remote(self, call: EngineCall) -> Any:
        self.calls.append(call)
        number = 0 if FIRST not in liveness.silent_engines() else 1
        address = (self.relay.address, self.receiver.address)[number]
        sent = replace(call, channel=address)
        liveness.place_call(call.stream_id, (FIRST, SECOND)[number])
        self.tasks.append(task := asyncio.ensure_future(self.engines[number].sender.generate(sent)))
        return task

    @property
    def client(self) -> HandleClient:
        handle: Any = self
        return HandleClient(handle, handle, self.receiver, Migration(3, 30.0, 256))


@asynccontextmanager
async def two_engines() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(rig(gated=True)) for _ in range(2)]
        second.sender._replica_id = SECOND
        receiver = receiver_of(first)
        relay = await stack.enter_async_context(relay_to(receiver.address))
        pair = Pair((first, second), receiver, relay)
        try:
            yield pair
        finally:
            for task in pair.tasks:
                task.cancel()
            await asyncio.gather(*pair.tasks, return_exceptions=True)


async def test_a_stream_goes_on_at_another_engine_and_the_one_that_was_cut_off_computes_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve's cancellation of the call does not reach that engine,
    and neither does what is sent while it is cut off."""
    monkeypatch.setattr(channel_socket, "HEARTBEAT_MS", 50)
    async with two_engines() as pair:
        first, second = pair.engines
        aborted = spied_aborts(first)
        monkeypatch.setattr("serve_app.channel.handle_client._HandleAttempt._cancel", lambda attempt: None)
        got: list[Event] = []
        async with aclosing(pair.client.stream(Submission("r", PROMPT, LONG))) as stream:

            async def read(least: int) -> None:
                while len(got) < least:
                    got.extend(await anext(stream))

            reader = asyncio.ensure_future(read(11))
            await first.submitted(1)
            first.gate.let(10)
            await reader
            pair.relay.hold()
            first.gate.let(20)  # it is alive, and continues
            await until(lambda: len(first.gate.plans) == 30)
            second.gate.open()
            look(pair.receiver, MOST_LOOKS + 1)
            await read(102)
        assert [event.token_id for event in got if isinstance(event, Token)] == EXPECTED
        assert not aborted
        pair.relay.go_on()
        await until(lambda: aborted)  # by a late frame, or by a beat
        first.gate.open()
        await first.idle()
        assert len(first.gate.plans) < 100, "it kept computing for a stream that had moved"
        await until(lambda: look(pair.receiver, 1) == set())


async def test_a_request_that_waits_in_an_engine_for_nobody_is_ended_by_a_beat() -> None:
    """It sends no frame to which the ingress could reply."""
    async with rig(gated=True) as engine:
        receiver = receiver_of(engine)
        aborted = spied_aborts(engine)
        call = engine.call(receiver)
        await until(lambda: call.stream.peer is not None)
        del receiver._streams[call.stream.stream_id]  # the message that it was closed was lost
        await until(lambda: aborted == {"r"})


# --- lost frames -----------------------------------------------------------------------------------------------------


async def test_what_was_lost_with_a_connection_is_sent_again() -> None:
    """Regression: a stream with a gap stood still until its request's end."""
    async with rig(gated=True) as engine:
        receiver = receiver_of(engine)
        async with relay_to(receiver.address) as relay:
            call = engine.call(receiver, address=relay.address)
            await lose_ten_steps(engine, call, relay)
            engine.gate.let(1)
            await call.read(22)
            assert not call.answer.done(), "all tokens came through the channel"
            engine.gate.open()
            assert await call.read_all() == EXPECTED
            assert call.stream.counts.gaps == 1


async def test_a_request_to_send_again_that_is_lost_is_made_again_with_the_next_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(gated=True) as engine:
        receiver = receiver_of(engine)
        call = engine.call(receiver)
        await engine.submitted(1)
        engine.gate.let(5)
        await call.read(6)
        send, lost = receiver._reply, []
        monkeypatch.setattr(receiver, "_reply", lambda peer, reply: bool(lost.append(reply)))
        (live,) = (peer._calls["r"] for peer in engine.sender._peers.values())
        live.num_sent += 1  # as if a frame with one token had been refused
        engine.gate.let(2)
        await until(lambda: lost)
        monkeypatch.setattr(receiver, "_reply", send)
        await until(lambda: call.stream.missing is None)  # during the call, because an engine beats for no others
        engine.gate.open()
        assert await call.read_all() == EXPECTED


# --- the roll call ---------------------------------------------------------------------------------------------------


class Deployment:
    """Engine replicas as the handle of one ingress replica reaches them."""

    def __init__(self, engine: Rig, *errors: Exception) -> None:
        self._engine = engine
        self._errors = list(errors)
        self.num_calls = 0

    def broadcast(self, method: str, address: ChannelAddress) -> Deployment:
        assert method == "beat_for"
        self.num_calls += 1
        self._engine.sender.attach(address)
        return self

    async def results_async(self) -> list[None]:
        if self._errors:
            raise self._errors.pop()
        return [None]


async def test_an_engine_that_is_not_heard_of_is_asked_to_beat_whatever_the_others_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll_call, "LOOK_S", 0)
    async with rig() as engine:
        receiver = receiver_of(engine)
        deployment: Any = Deployment(engine, RayActorError(), TimeoutError())
        task = asyncio.ensure_future(call_the_roll(deployment, receiver))
        await until(lambda: receiver.unheard == {SECOND} and deployment.num_calls >= 3)
        liveness.set_engines(frozenset({FIRST}))
        await until(lambda: not receiver.unheard)
        asked = deployment.num_calls
        for _ in range(10):
            await asyncio.sleep(0)
        assert deployment.num_calls <= asked + 1, "nobody is asked while all are heard"
        task.cancel()
