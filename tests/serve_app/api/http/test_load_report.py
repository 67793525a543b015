"""Contracts of what a response tells a load balancer:
the load, in the form that it asked for, and nothing if it did not ask.
Never asks an engine: the numbers are given."""

from __future__ import annotations

import json

import pytest
from starlette.types import ASGIApp

from serve_app.engines.engine_load import EngineLoad
from tests.serve_app.harness import CHAT, Answer, Exchange, ScriptedClient, app_for, finished, scheduled, tokens

pytestmark = pytest.mark.anyio

TOLD = "endpoint-load-metrics"
LOAD = EngineLoad(kv_cache_usage=1 / 3, num_waiting=7)
NUMBERS = {"kv_cache_usage_perc": 0.3333, "num_requests_waiting": 7}


def app(load: EngineLoad | None = LOAD) -> ASGIApp:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    return app_for(client, engine_load=lambda: load)


async def ask(at: ASGIApp, form: str | None, path: str = "/v1/chat/completions", **fields: object) -> Answer:
    headers = [("content-type", "application/json")]
    headers += [] if form is None else [("endpoint-load-metrics-format", form)]
    return await Exchange(at, "POST", path, json.dumps(CHAT | fields).encode(), headers).finish()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_tells_the_load_as_text_or_json(stream: bool) -> None:
    text = (await ask(app(), "TEXT", stream=stream)).headers[TOLD]
    assert text == "TEXT named_metrics.kv_cache_usage_perc=0.3333, named_metrics.num_requests_waiting=7"
    kind, _, told = (await ask(app(), "json", stream=stream)).headers[TOLD].partition(" ")
    assert (kind, json.loads(told)) == ("JSON", {"named_metrics": NUMBERS})


async def test_a_refusal_tells_it_too() -> None:
    answer = await ask(app(), "TEXT", model="other")
    assert (answer.status, answer.headers[TOLD].startswith("TEXT ")) == (404, True)


@pytest.mark.parametrize("form", [None, "", "BIN", "text/plain"])
async def test_no_load_is_sent_to_a_client_that_does_not_ask_or_asks_for_another_form(form: str | None) -> None:
    answer = await ask(app(), form)
    assert (answer.status, TOLD in answer.headers) == (200, False)


async def test_before_an_engine_has_reported_no_load_is_sent() -> None:
    assert TOLD not in (await ask(app(None), "TEXT")).headers


async def test_other_routes_tell_nothing() -> None:
    answer = await Exchange(app(), "GET", "/health", headers=[("endpoint-load-metrics-format", "TEXT")]).finish()
    assert TOLD not in answer.headers
