"""Owns the proof that several ingress replicas share one store of responses, and do without it while it is down.
Never tests what is kept, and for how long: tests of the store and of the API do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.server import Server
from tests.chaos.support import MODEL, kill, replicas
from tests.support.serve_process import PYTHON_PROXY, serve_run

pytestmark = [pytest.mark.server, pytest.mark.slow]

ARGS: dict[str, Any] = {"engine": {"executor": "fake"}, "ingress_replicas": 2, "ingress_num_cpus": 0.1}
PATIENCE_S = 90


def respond(server: Server, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_output_tokens": 4, **fields}
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)


def lookups(server: Server) -> list[float]:
    """Return the number for each ingress replica."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples]
    return [one.value for one in samples if one.name == "chunkserve:responses_store_queries_total"]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_every_ingress_replica_finds_what_any_has_kept_and_serves_on_without_the_store() -> None:
    with serve_run(ARGS, env=PYTHON_PROXY) as server:
        told = respond(server, input="one").json()
        assert told["store"] is True

        def goes_on() -> httpx.Response:
            references = [{"type": "item_reference", "id": item["id"]} for item in told["output"]]
            return respond(server, previous_response_id=told["id"], input=references)

        def has_asked_twice() -> bool:
            assert goes_on().status_code == 200
            return len(counts := lookups(server)) == 2 and min(counts) >= 2

        until(has_asked_twice)
        (store,) = replicas(server, "chunkserve:ResponsesStore")
        kill(store)
        refused = goes_on()
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
        answers = [respond(server, input="two") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4

        def is_kept_again() -> bool:
            """Each ingress replica asks the new store when its pause is over."""
            nonlocal told
            told = respond(server, input="three").json()
            return bool(told["store"])

        until(is_kept_again)
        until(lambda: goes_on().status_code == 200)
