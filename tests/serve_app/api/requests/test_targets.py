"""A request's own service-level targets: which of them the engine gets, and which are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.config import Targets
from serve_app.engines.engine_client import ServedModel
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    Answer,
    Exchange,
    ScriptedClient,
    app_for,
    finished,
    scheduled,
    tokens,
)

pytestmark = pytest.mark.anyio

ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)]
TIMED = replace(MODEL, targets=Targets(tpot_ms=50, ttft_ms=1000))


async def post(
    client: ScriptedClient,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    model: ServedModel = TIMED,
    **options: Any,
) -> Answer:
    sent = [("content-type", "application/json"), *headers.items()]
    return await Exchange(
        app_for(client, model=model, **options), "POST", path, json.dumps(body).encode(), sent
    ).finish()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("headers", "fields", "tpot_ms", "ttft_ms"),
    [
        ({}, {}, None, None),
        ({"x-slo-tpot-ms": "100"}, {}, 100.0, None),
        ({"X-SLO-TTFT-Ms": "2500.5"}, {}, None, 2500.5),
        ({}, {"slo_tpot_ms": 80, "slo_ttft_ms": 9000.0}, 80.0, 9000.0),
        ({"x-slo-tpot-ms": "100", "x-slo-ttft-ms": "1000"}, {"slo_tpot_ms": 80, "slo_ttft_ms": 3000}, 80.0, 1000.0),
        ({}, {"slo_tpot_ms": None}, None, None),
    ],
)
async def test_the_engine_gets_the_shorter_of_the_header_and_the_field(
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    fields: dict[str, Any],
    tpot_ms: float | None,
    ttft_ms: float | None,
) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    assert (await post(client, path, body | fields, headers)).status == 200
    assert (client.submissions[0].tpot_ms, client.submissions[0].ttft_ms) == (tpot_ms, ttft_ms)


@pytest.mark.parametrize(
    ("headers", "fields", "param", "error"),
    [
        ({}, {"slo_tpot_ms": 0}, "slo_tpot_ms", "greater than or equal to 1"),
        ({}, {"slo_tpot_ms": "fast"}, "slo_tpot_ms", "number"),
        *(({"x-slo-tpot-ms": text}, {}, "X-SLO-TPOT-Ms", "should be milliseconds")
          for text in ("", "soon", "-1", "0", "nan", "inf", "1e3", "0x50", "5" * 400, "86400001")),
    ],
)  # fmt: skip
async def test_a_target_that_cannot_be_kept_is_refused_by_name(
    headers: dict[str, str], fields: dict[str, Any], param: str, error: str
) -> None:
    client = ScriptedClient()
    answer = await post(client, "/v1/completions", PROMPT | fields, headers)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert error in answer.error["message"]
    assert len(answer.error["message"]) < 300
    assert client.submissions == []


SHORT = [
    ({"x-slo-tpot-ms": "20"}, {}, "X-SLO-TPOT-Ms", "must be >= 50, this server's own target, but it is 20"),
    ({}, {"slo_ttft_ms": 999}, "slo_ttft_ms", "must be >= 1000, this server's own target, but it is 999"),
    ({"x-slo-tpot-ms": "100"}, {"slo_tpot_ms": 49.5}, "slo_tpot_ms", "must be >= 50"),
]


@pytest.mark.parametrize(("headers", "fields", "param", "error"), SHORT)
async def test_a_target_that_is_shorter_than_the_servers_is_a_hint_without_effect(
    headers: dict[str, str], fields: dict[str, Any], param: str, error: str
) -> None:
    """Gateways send such headers to whatever server there is. The server's own target counts."""
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    answer = await post(client, "/v1/completions", PROMPT | fields, headers)
    assert (answer.status, answer.headers["x-chunkserve-ignored"]) == (200, param)
    assert (client.submissions[0].tpot_ms, client.submissions[0].ttft_ms) == (None, None)
    strict = ScriptedClient()
    answer = await post(strict, "/v1/completions", PROMPT | fields, headers, strict=True)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert error in answer.error["message"]
    assert strict.submissions == []


@pytest.mark.parametrize("name", ["tpot", "ttft"])
async def test_where_the_server_schedules_by_no_target_one_is_a_hint_without_effect(name: str) -> None:
    client = ScriptedClient([scheduled()], tokens("a"), [finished()])
    headers = {f"x-slo-{name}-ms": "5000"}
    answer = await post(client, "/v1/completions", PROMPT, headers, model=MODEL)
    assert (answer.status, answer.headers["x-chunkserve-ignored"]) == (200, f"X-SLO-{name.upper()}-Ms")
    answer = await post(ScriptedClient(), "/v1/completions", PROMPT, headers, model=MODEL, strict=True)
    assert answer.status == 400
    assert f"engine.targets.{name}_ms" in answer.error["message"]
