"""Owns the contract of requests that are at no gate: they count from before their bodies are read, whatever they ask.
Never waits for real time: bodies arrive when a test sends them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.admission.arrivals import Arrivals
from serve_app.admission.gate import Gate
from serve_app.admission.room import Room
from serve_app.auth.keys import Keys, digest
from serve_app.errors.api_error import ApiError
from serve_app.settings.auth import ApiKey
from serve_app.settings.limits import GatePolicy, Limits, RoomPolicy, Tenant
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store.entry import Entry
from serve_app.store.memory import LocalMemory
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    ScriptedClient,
    app_for,
    finished,
    scheduled,
)

pytestmark = pytest.mark.anyio
ANN, BOB = Tenant(name="ann"), Tenant(name="bob")
KEYS = Keys([ApiKey(tenant=name, sha256=digest(name.encode())) for name in ("ann", "bob")])
WITHOUT_ENGINE: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [104]}),
    ("/v1/messages/count_tokens", CHAT),
]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"model": MODEL.id, "input": "hi"}),
    ("/v1/messages", CHAT | {"max_tokens": 1}),
    *WITHOUT_ENGINE,
]


def server(memory: LocalMemory | None = None, **limits: int) -> ASGIApp:
    """A server that takes two requests at a time of each tenant, unless told otherwise."""
    policy = GatePolicy(tenant=Limits(max_concurrent_requests=2), deployment=Limits(**limits))
    return app_for(ScriptedClient([scheduled()], [finished()]), keys=KEYS, gate=Gate(policy), memory=memory)


class Upload:
    """A request whose body is asked for, and then sent."""

    def __init__(self, app: ASGIApp, path: str, body: Any, tenant: str = "ann") -> None:
        self.num_asked = 0
        self.asked, self._may_arrive = asyncio.Event(), asyncio.Event()
        headers = [("content-type", "application/json"), ("authorization", f"Bearer {tenant}")]

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            async def receive_late() -> Message:
                self.num_asked += 1
                self.asked.set()
                await self._may_arrive.wait()
                return await receive()

            await app(scope, receive_late, send)

        self.exchange = Exchange(slow, "POST", path, json.dumps(body).encode(), headers)

    async def begun(self) -> Upload:
        await asyncio.wait_for(self.asked.wait(), TIMEOUT_S)
        return self

    async def refused(self) -> Answer:
        """Return the answer, which comes before the body."""
        answer = await self.exchange.finish()
        assert self.num_asked == 0
        return answer

    async def finish(self) -> Answer:
        self._may_arrive.set()
        return await self.exchange.finish()


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_tenants_request_counts_before_its_body_is_read_and_is_no_matter_to_others(
    path: str, body: dict[str, Any]
) -> None:
    """150 uploads of one tenant were held in memory, 4 MB each, and the gate counted none."""
    app = server()
    uploads = [await Upload(app, path, body).begun() for _ in range(2)]
    for other, content in ROUTES:
        answer = await Upload(app, other, content).refused()
        assert (answer.status, answer.headers["x-ratelimit-limit-requests"]) == (429, "2")
    assert (await Upload(app, path, body, "bob").finish()).status == 200
    assert [(await upload.finish()).status for upload in uploads] == [200, 200]
    assert (await Upload(app, path, body).finish()).status == 200


class SlowMemory(LocalMemory):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(ResponsesStoreSettings())
        self.num_asked = 0
        self.may_answer = asyncio.Event()

    async def get(self, tenant: str, response_id: str) -> Entry | None:
        self.num_asked += 1
        await self.may_answer.wait()
        return await super().get(tenant, response_id)


@pytest.mark.parametrize("suffix", ["", "/input_items"])
async def test_who_reads_kept_responses_has_no_more_requests_than_others(suffix: str) -> None:
    """Regression: each such request may read megabytes, most of a second of a core, and no limit counted them."""
    memory = SlowMemory()
    app = server(memory=memory)

    def ask(method: str = "GET", tenant: str = "ann") -> Exchange:
        return Exchange(app, method, f"/v1/responses/resp_a{suffix}", headers=[("authorization", f"Bearer {tenant}")])

    waiting = [ask(), ask()]
    while memory.num_asked < 2:
        await asyncio.sleep(0)
    more = [ask(), *([] if suffix else [ask("DELETE")])]
    assert [(await one.finish()).status for one in more] == [429] * len(more)
    assert (await Upload(app, "/tokenize", {"prompt": "hi"}).refused()).status == 429
    memory.may_answer.set()
    assert [(await one.finish()).status for one in (*waiting, ask(), ask(tenant="bob"))] == [404] * 4


async def test_bodies_are_not_read_beyond_the_deployments_limit() -> None:
    app = server(max_concurrent_requests=2)
    uploads = [await Upload(app, "/v1/completions", PROMPT, name).begun() for name in ("ann", "bob")]
    answer = await Upload(app, "/v1/completions", PROMPT).refused()
    assert (answer.status, answer.error["code"]) == (503, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert [(await upload.finish()).status for upload in uploads] == [200, 200]


async def test_no_body_is_read_for_a_gate_that_is_full_or_closed_but_for_routes_without_an_engine() -> None:
    gate = Gate(GatePolicy(deployment=Limits(max_concurrent_requests=1)))
    app = app_for(ScriptedClient(), keys=KEYS, gate=gate)
    with gate.enter(BOB):
        answer = await Upload(app, "/v1/completions", PROMPT).refused()
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        for path, body in WITHOUT_ENGINE:
            assert (await Upload(app, path, body).finish()).status == 200
    gate.close()
    answer = await Upload(app, "/v1/completions", PROMPT).refused()
    assert (answer.status, answer.error["code"]) == (503, "draining")
    assert (await Upload(app, *WITHOUT_ENGINE[0]).finish()).status == 200


def test_an_arrival_that_ends_early_or_goes_to_its_gate_counts_no_longer() -> None:
    gate = Gate(GatePolicy(tenant=Limits(max_concurrent_requests=1)))
    arrivals = Arrivals([gate])

    def fail() -> None:
        with arrivals.enter(ANN):
            assert (arrivals.amount, gate.account(ANN).requests.amount) == (1, 1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with arrivals.enter(ANN) as arrival:
        arrival.leave()
        with arrivals.enter(ANN):
            assert arrivals.amount == 1
    assert (arrivals.amount, gate.account(ANN).requests.amount) == (0, 0)


def test_a_body_is_read_if_any_models_gate_may_take_its_request_and_counts_for_all() -> None:
    room = Room(RoomPolicy(limits=Limits(max_concurrent_requests=8), shares=(0.5, 0.5)))
    own = [
        GatePolicy(tenant=Limits(max_concurrent_requests=3), deployment=Limits(max_concurrent_requests=most))
        for most in (1, 2)
    ]
    gates = [Gate(policy, room=room) for policy in own]
    arrivals = Arrivals(gates)
    gates[0].close()
    arrivals.check_gates(ANN)
    gates[1].close()
    with pytest.raises(Exception, match="draining"):
        arrivals.check_gates(ANN)
    with arrivals.enter(ANN), arrivals.enter(BOB):
        assert [gate.account(ANN).requests.amount for gate in gates] == [1, 1]
        with pytest.raises(ApiError, match="takes 2 requests at a time"), arrivals.enter(ANN):
            pass
