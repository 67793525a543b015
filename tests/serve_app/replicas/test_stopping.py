"""Owns the contract of an ingress replica that Serve stops: it serves on for the drain timeout, and then tells the
clients of what still runs. Never starts Ray: a server's start shows that the replica finds itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray._private.worker import global_worker
from ray.serve._private.replica import Replica

from engine.protocol import ErrorCode, RequestRejected
from serve_app.admission.gate import Gate
from serve_app.replicas import stopping
from serve_app.replicas.deployment import IngressReplica
from serve_app.replicas.stopping import end_at_stop, is_stopping
from tests.support.conditions import until

pytestmark = pytest.mark.anyio

DRAIN_TIMEOUT_S = 30


class Client:
    ended = False

    def end(self) -> None:
        self.ended = True


def ingress(*gates: Gate) -> tuple[IngressReplica, list[Client]]:
    replica, clients = IngressReplica.__new__(IngressReplica), [Client() for _ in gates]
    models = {
        str(i): SimpleNamespace(gate=gate, client=client)
        for i, (gate, client) in enumerate(zip(gates, clients, strict=True))
    }
    vars(replica).update(_models=models, _sleepers={}, _tracer=None)
    return replica, clients


async def test_rays_replica_notes_its_stop_before_it_waits_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own code runs here: a release that renames the note, or makes it later, fails this test."""
    replica = Replica.__new__(Replica)
    waiting = asyncio.Event()

    async def drain_requests(*_: object) -> None:
        waiting.set()
        await asyncio.Event().wait()

    vars(replica).update(
        _shutting_down=False,
        _user_callable_initialized=True,
        _ingress=False,
        _deployment_config=SimpleNamespace(graceful_shutdown_timeout_s=1),
        _drain_ongoing_requests=drain_requests,
    )
    monkeypatch.setattr(global_worker, "actors", {global_worker.actor_id: SimpleNamespace(_replica_impl=replica)})
    assert not is_stopping()
    stop = asyncio.ensure_future(replica._perform_graceful_shutdown())
    await waiting.wait()
    assert is_stopping()
    stop.cancel()


async def test_a_replica_that_serve_stops_serves_on_and_then_ends_its_streams_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only `serve run` asked it to: in a rollout, streams longer than the drain timeout were cut with the process."""
    gates, stop, late, sleeps = (Gate(), Gate()), asyncio.Event(), asyncio.Event(), list[float]()
    replica, clients = ingress(*gates)
    pause = asyncio.sleep

    async def sleep(duration_s: float) -> None:
        sleeps.append(duration_s)
        await (late.wait() if duration_s == DRAIN_TIMEOUT_S else pause(0))

    monkeypatch.setattr(stopping, "asyncio", SimpleNamespace(sleep=sleep))
    end = asyncio.ensure_future(end_at_stop(DRAIN_TIMEOUT_S, replica._end_streams, stop.is_set))
    with gates[0].enter():
        await until(lambda: len(sleeps) > 3)
        assert sleeps[-1] == stopping.LOOK_S
        stop.set()
        await until(lambda: sleeps[-1] == DRAIN_TIMEOUT_S)
        with gates[0].enter():  # a proxy may not know yet that the replica leaves
            assert [client.ended for client in clients] == [False, False]
        late.set()
        await end
        assert [client.ended for client in clients] == [True, True]
    for gate in gates:
        with pytest.raises(RequestRejected) as refused:
            gate.enter()
        assert refused.value.code is ErrorCode.DRAINING
