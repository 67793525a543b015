"""Owns the contract of the admin routes: who may use them, and what an abort, a drain and a cache reset leave behind.
Never sleeps for a result: everything waits for a condition."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from engine.build.engine import build_engine
from engine.config import EngineConfig
from engine.protocol import EngineError, ErrorCode
from serve_app.admission.gate import Gate
from serve_app.api.generation.live import LiveRequests
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from serve_app.settings.auth import ApiKey
from serve_app.settings.limits import GatePolicy
from tests.serve_app.harness import (
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    LocalClient,
    ScriptedClient,
    app_for,
    finished,
    scheduled,
    tokens,
)
from tests.support.conditions import until

pytestmark = pytest.mark.anyio
ADMIN, ANNS = "sk-admin", "sk-ann"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


KEYS = Keys(admin_sha256=sha256(ADMIN))
ROUTES = ["/admin/abort", "/admin/drain", "/admin/resume", "/admin/reset_prefix_cache"]


async def admin(app: Any, path: str, body: Any = None, key: str | None = ADMIN) -> Answer:
    headers = [("content-type", "application/json")] + ([("authorization", f"Bearer {key}")] if key else [])
    return await Exchange(app, "POST", path, b"" if body is None else json.dumps(body).encode(), headers).finish()


def begin(app: Any, request_id: str, **fields: Any) -> Exchange:
    headers = [("content-type", "application/json"), ("x-request-id", request_id)]
    return Exchange(app, "POST", "/v1/completions", json.dumps(PROMPT | fields).encode(), headers)


async def until_live(gate: Gate, live: int, waiting: int) -> None:
    await until(lambda: (gate.snapshot().num_live, gate.snapshot().num_waiting) == (live, waiting))


async def text_of(exchange: Exchange, text: bytes) -> bytes:
    """Return the stream so far, up to the frame that has `text`."""
    seen = b""
    while text not in seen:
        seen += (await exchange.next()).get("body", b"")
    return seen


# --- who ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("key", [None, ADMIN])
async def test_without_an_admin_key_in_the_config_nobody_is_let_in_and_told_why(path: str, key: str | None) -> None:
    client = ScriptedClient()
    answer = await admin(app_for(client), path, {"request_id": "r"}, key)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (403, "permission_error", "admin_disabled")
    assert "auth.admin_sha256" in answer.error["message"]
    assert client.drains == []


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("key", "status", "code"),
    [(None, 401, "invalid_api_key"), ("sk-nobody", 401, "invalid_api_key"), (ANNS, 403, "admin_key_required")],
)
async def test_a_tenants_key_opens_no_admin_route(path: str, key: str | None, status: int, code: str) -> None:
    """A known tenant who may not is a 403: only another key helps, not a better spelling of this one."""
    client = ScriptedClient()
    keys = Keys([ApiKey(tenant="ann", sha256=sha256(ANNS))], sha256(ADMIN))
    answer = await admin(app_for(client, keys=keys), path, {"request_id": "r"}, key)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    assert client.drains == []


async def test_the_admin_key_is_no_tenants_key() -> None:
    keys = Keys([ApiKey(tenant="ann", sha256=sha256(ANNS))], sha256(ADMIN))
    assert (await admin(app_for(ScriptedClient(), keys=keys), "/v1/completions", PROMPT)).status == 401


# --- abort ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["X-Request-Id", "id"])
async def test_an_aborted_stream_ends_with_an_error_frame_and_leaves_the_engine(by: str) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    app = app_for(client, keys=KEYS)
    exchange = begin(app, "mine", stream=True)
    seen = await text_of(exchange, b'"text":"a"')
    name = "mine" if by == "X-Request-Id" else json.loads(seen.partition(b"data: ")[2].partition(b"\n")[0])["id"]
    answer = await admin(app, "/admin/abort", {"request_id": name})
    assert (answer.status, answer.json) == (200, {"request_id": name, "aborted": True})
    last = await text_of(exchange, b"[DONE]")
    assert b'"code":"aborted"' in last
    assert client.closed.is_set()


async def test_an_aborted_answer_is_an_error_that_no_client_repeats() -> None:
    client = ScriptedClient([scheduled()], tokens("a"), asyncio.Event())
    app = app_for(client, keys=KEYS)
    exchange = begin(app, "mine")
    await client.started.wait()
    assert (await admin(app, "/admin/abort", {"request_id": "mine"})).status == 200
    answer = await exchange.finish()
    assert (answer.status, answer.error["code"]) == (500, "aborted")
    assert answer.headers["x-should-retry"] == "false"
    assert client.closed.is_set()


async def test_a_request_that_waits_at_the_gate_is_aborted_there() -> None:
    client, gate = ScriptedClient(asyncio.Event()), Gate(GatePolicy(dispatch_per_engine=1))
    app = app_for(client, keys=KEYS, gate=gate)
    running, waiting = begin(app, "first"), begin(app, "second")
    await until_live(gate, live=2, waiting=1)
    assert (await admin(app, "/admin/abort", {"request_id": "second"})).status == 200
    assert (await waiting.finish()).error["code"] == "aborted"
    assert len(client.submissions) == 1
    running.disconnect()
    await asyncio.wait_for(running.task, TIMEOUT_S)
    await until_live(gate, live=0, waiting=0)


async def test_requests_of_the_same_name_are_aborted_together() -> None:
    client = ScriptedClient(asyncio.Event())
    app = app_for(client, keys=KEYS)
    twins = [begin(app, "twin"), begin(app, "twin")]
    while len(client.submissions) < 2:
        await asyncio.sleep(0)
    await admin(app, "/admin/abort", {"request_id": "twin"})
    assert [(await twin.finish()).error["code"] for twin in twins] == ["aborted", "aborted"]


async def test_an_engine_whose_items_are_always_there_does_not_outrun_an_abort() -> None:
    live = LiveRequests()
    with live.track("r") as lifecycle:
        live.abort("r")
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ready.set_result(1)
        with pytest.raises(Exception, match="aborted"), lifecycle.bound():
            await ready


async def test_an_ended_request_leaves_no_name_behind() -> None:
    live = LiveRequests()
    with live.track("a", "b"), live.track("b"):
        pass
    assert live.abort("b") == 0
    assert not live._by_name


@pytest.mark.parametrize(("elsewhere", "status"), [(True, 200), (False, 404)])
async def test_an_id_that_is_not_live_here_is_asked_for_elsewhere(elsewhere: bool, status: int) -> None:
    client = ScriptedClient()
    client.aborted_elsewhere = {"r"} if elsewhere else set()
    answer = await admin(app_for(client, keys=KEYS), "/admin/abort", {"request_id": "r"})
    assert answer.status == status
    if status == 404:
        assert (answer.error["param"], answer.error["code"]) == ("request_id", "request_not_found")


@pytest.mark.parametrize("body", [{}, {"request_id": ""}, {"request_id": 1}, {"request_id": "a", "force": True}, []])
async def test_a_wrong_abort_is_a_400(body: Any) -> None:
    assert (await admin(app_for(ScriptedClient(), keys=KEYS), "/admin/abort", body)).status == 400


# --- drain ----------------------------------------------------------------------------------------------------------


async def test_a_drained_deployment_finishes_what_runs_refuses_the_rest_and_can_be_resumed() -> None:
    gate_open = asyncio.Event()
    client = ScriptedClient([scheduled()], gate_open, tokens("a"), [finished()])
    app = app_for(client, keys=KEYS)
    running = begin(app, "running")
    await client.started.wait()
    assert (await admin(app, "/admin/drain")).json == {"draining": True}
    refused = await begin(app, "late").finish()
    assert (refused.status, refused.error["code"]) == (503, "draining")
    assert {"retry-after", "retry-after-ms"} <= set(refused.headers)
    unready = await Exchange(app, "GET", "/ready", headers=()).finish()
    assert (unready.status, unready.error["code"]) == (503, "draining")
    assert "retry-after" in unready.headers
    alive = await Exchange(app, "GET", "/health", headers=()).finish()
    assert alive.status == 200, "a probe of it would restart what is to finish"
    gate_open.set()
    assert (await running.finish()).status == 200
    assert (await admin(app, "/admin/resume")).json == {"draining": False}
    assert (await begin(app, "again").finish()).status == 200
    assert (await Exchange(app, "GET", "/ready", headers=()).finish()).status == 200
    assert client.drains == [True, False], "the other ingress replicas were told"


async def test_a_drain_that_another_replica_did_not_hear_of_is_no_success() -> None:
    class Deaf(ScriptedClient):
        async def drain_all(self, draining: bool) -> None:
            raise EngineError(ErrorCode.ENGINE_DEAD, "An ingress replica does not answer.")

    assert (await admin(app_for(Deaf(), keys=KEYS), "/admin/drain")).status == 503


# --- the prefix cache -----------------------------------------------------------------------------------------------


async def test_a_reset_says_how_many_blocks_each_engine_dropped() -> None:
    answer = await admin(app_for(ScriptedClient(), keys=KEYS), "/admin/reset_prefix_cache")
    assert (answer.status, answer.json) == (200, {"dropped_blocks": [3]})


async def test_after_a_reset_a_prompt_is_computed_again() -> None:
    engine = build_engine("", EngineConfig(executor="fake"))
    try:
        app = create_app(LocalClient(engine), Tokenizer.byte_level(), MODEL, keys=KEYS)

        async def num_cached() -> int:
            answer = await begin(app, "r", prompt="a" * 64, max_tokens=1).finish()
            return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await num_cached() == 0
        assert await num_cached() > 0
        (dropped,) = (await admin(app, "/admin/reset_prefix_cache")).json["dropped_blocks"]
        assert dropped >= 4
        assert await num_cached() == 0
    finally:
        engine.shutdown()
