"""Owns the proof that a real server says of every request where its time went, whichever replica is asked.
Never looks inside the server, except to kill a process of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loadtest.server import Server
from tests.serve_app.metrics.test_serve_run import processes_of, replicas, total, until
from tests.support.serve_process import serve_run

pytestmark = [pytest.mark.server, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
WAIT_S = 60  # only ever reached by a failure
ANN, BOB = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = {
        "executor": "fake",
        "fake": {"step_delay_ms": 10, "token_delay_ms": 0.05},
        "targets": {"tpot_ms": 50},
        "max_num_seqs": 8,
    }
    keys = [{"tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("ann", "bob")]
    settings = {"engine": engine, "engine_replicas": 2, "ingress_replicas": 2, "auth": {"keys": keys}}
    with serve_run(settings) as running:
        until(running, lambda series: len(replicas(series, "engine")) == len(replicas(series, "ingress")) == 2)
        yield running


def timing(server: Server, name: str) -> dict[str, Any]:
    """Return a request's timing. A client has the last byte a moment before the server has added up."""
    deadline = time.monotonic() + WAIT_S
    while (answer := httpx.get(f"{server.url}/v1/requests/{name}/timing", headers=ANN, timeout=30)).status_code == 404:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


BUSY_MACHINE = {"client", "slow_steps"}
"""What other work on the machine adds: these tests are the client, and share its cores with the server."""


def causes(told: dict[str, Any]) -> list[str]:
    """Return the causes that slowed a request down, the greatest first, without those of a busy machine."""
    return [part["cause"] for part in told["slowed_by"] if part["cause"] not in BUSY_MACHINE]


def ask(server: Server, name: str, **fields: Any) -> tuple[float, str]:
    """Send a request and read it to its end; return the seconds that it took, and its last line."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "temperature": 0} | fields
    begun, headers = time.monotonic(), ANN | {"x-request-id": name}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    return time.monotonic() - begun, lines[-1]


def test_every_request_is_explained_by_any_replica_to_its_own_tenant_alone(server: Server) -> None:
    text = json.loads(ask(server, "first")[1])["choices"][0]["text"]
    kinds: list[dict[str, Any]] = [{}, {"stream": True}, {"stop": text[2:4], "stream": True}, {"n": 3, "seed": 1}]
    names = [f"request-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server, name, **kinds[i % len(kinds)]) for i, name in enumerate(names)]
        seen = {name: one.result()[0] for name, one in zip(names, asked, strict=True)}
    for name in names:
        for _ in range(3):  # connections of their own, so that both ingress replicas are asked
            told = timing(server, name)
            parts = [*told["own"], *told["slowed_by"]]
            assert sum(part["ms"] for part in parts) == pytest.approx(told["wall_ms"], rel=0.02)
            assert told["wall_ms"] <= seen[name] * 1000
            assert {part["cause"] for part in told["own"]} == {"prefill", "decode"}, "nothing is unrecorded"
            stranger = httpx.get(f"{server.url}/v1/requests/{name}/timing", headers=BOB, timeout=30)
            assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "request_not_found")


def test_streams_whose_engine_is_killed_name_their_migration_first(server: Server) -> None:
    names = [f"moved-{number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server, name, max_tokens=200, stream=True) for name in names]
        until(server, lambda series: total(series, "vllm:generation_tokens_total") > 500)
        os.kill(processes_of(server, "Engine")[0], signal.SIGKILL)
        assert [one.result()[1] for one in asked] == ["data: [DONE]"] * len(names)
    told = [timing(server, name) for name in names]
    moved = [one for one in told if one["migrations"]]
    assert moved, "one of the two engines had none of eight streams"
    for one in moved:
        assert causes(one)[0] == "migration"
    assert all("migration" not in causes(one)[:1] for one in told if not one["migrations"])


def test_in_a_burst_those_who_waited_for_a_seat_are_told_so(server: Server) -> None:
    """Two engines of eight seats are sent 64 at once, whose answers take a second."""
    names = [f"burst-{number}" for number in range(64)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: ask(server, name, max_tokens=60), names))
    told = sorted((timing(server, name) for name in names), key=lambda one: float(one["wall_ms"]))
    first = Counter(causes(one)[0] for one in told[32:])  # a server short of processor time has other causes, too
    assert first["queue"] + first["gate"] > 16, first


def test_a_stream_beside_long_prompts_names_them_first(server: Server) -> None:
    """Prompts of 3,000 tokens, 150 ms each, come one after the other to both engines while one stream runs."""
    prompt = [7] * 3000
    with ThreadPoolExecutor(5) as pool:
        stream = pool.submit(ask, server, "beside", max_tokens=120, stream=True)
        until(server, lambda series: total(series, "vllm:num_requests_running") > 0)
        while not stream.done():
            list(pool.map(lambda _: ask(server, "long", prompt=prompt, max_tokens=1), range(4)))
    assert causes(timing(server, "beside"))[0] == "decode_beside_prompts"


def test_a_body_that_comes_slowly_is_named_first(server: Server) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}).encode()

    def slowly() -> Iterator[bytes]:
        yield body[:10]
        time.sleep(1.5)  # the injected cause
        yield body[10:]

    headers = ANN | {"x-request-id": "slow-body", "content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=slowly(), headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert causes(timing(server, "slow-body"))[0] == "upload"
