"""Owns the promise that an engine whose steps hang gives its requests up, so that they continue elsewhere.
Never goes through Ray: tests/chaos stops whole processes."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.async_engine import AsyncEngine
from engine.protocol import EngineError, ErrorCode, Submission
from serve_app.channel.token_receiver import TokenReceiver
from serve_app.engines.engine_call import EngineCall
from serve_app.replicas import deployment
from serve_app.replicas.deployment import EngineReplica
from serve_app.replicas.interpreter import TURN_S
from serve_app.settings.application import AppSettings
from tests.serve_app.channel.rig import HOST, LONG, TIMEOUT_S, Gate, engine_of
from tests.support.conditions import until

pytestmark = pytest.mark.anyio


async def is_healthy(replica: EngineReplica) -> bool:
    try:
        await replica.check_health()
    except EngineError:
        return False
    return True


async def warm_already(engine: AsyncEngine) -> None:
    """Skip the warm-up, which the closed gate would hold for ever."""


async def start_replica(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> EngineReplica:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="stalls"))
    monkeypatch.setattr(deployment, "log_as_serve_does", lambda: None)
    monkeypatch.setattr(deployment.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(deployment, "build_engine", lambda *_, **__: engine)
    monkeypatch.setattr(deployment, "warm_up", warm_already)
    replica = EngineReplica.__new__(EngineReplica)
    await replica.__init__(AppSettings(), 1)  # type: ignore[misc]  # Serve does so, too
    return replica


@pytest.fixture(autouse=True)
def _interpreter_as_before() -> Iterator[None]:
    turn_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(turn_s)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


async def test_the_thread_of_an_engines_steps_waits_no_longer_than_a_short_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it could wait 5 ms for the interpreter's lock, which is longer than a step of a GPU takes."""
    sys.setswitchinterval(0.005)
    gate = Gate()
    gate.open()
    replica = await start_replica(engine_of(gate), monkeypatch)
    try:
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    finally:
        replica._watchdog.end()
        replica._sender.shutdown()


async def test_a_stalled_engine_fails_its_health_check_and_gives_up_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the calls waited until Serve ended the replica, and Serve first waited for the calls."""
    gate = Gate()
    engine = engine_of(gate, stall_timeout_s=0.05)
    replica, receiver = await start_replica(engine, monkeypatch), TokenReceiver(HOST, 100)
    try:
        stream = receiver.open("r")
        call = EngineCall(Submission("r", (1, 2, 3), LONG), stream.stream_id, receiver.address)
        answer = asyncio.ensure_future(replica.generate(call))
        async with asyncio.timeout(TIMEOUT_S):
            while await is_healthy(replica):
                await asyncio.sleep(0.01)
            given_up = await answer
        assert not replica._watchdog._is_well(), "if Serve does not end it, the watchdog does"
        assert isinstance(given_up, EngineError)
        assert given_up.code is ErrorCode.ENGINE_DEAD
        gate.open()
        await until(lambda: not (engine.load().num_held_blocks or engine.load().num_running))
        async with asyncio.timeout(TIMEOUT_S):
            while not await is_healthy(replica):
                await asyncio.sleep(0.01)
        assert replica._watchdog._is_well()
        await replica.beat_for(receiver.address)
        assert [peer.address for peer in replica._sender._peers.values()] == [receiver.address]
    finally:
        gate.open()
        replica._watchdog.end()
        replica._sender.shutdown()
        receiver.shutdown()
