"""Owns what a client sees when an ingress replica ends: behind HAProxy, which cannot append to a stream, and behind Ray
Serve's Python proxy, which can.
Never expects a stream of a lost ingress replica to continue."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server import Server
from tests.chaos.support import INGRESS, completion, fake, kill, replicas, until_free, until_replicas
from tests.support.serve_process import PYTHON_PROXY, members_of, serve_run

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

NUM_STREAMS, NUM_WHOLE, NUM_TOKENS = 12, 12, 150


@pytest.fixture(params=[({}, 2), (PYTHON_PROXY, 1)], ids=["HAProxy", "Python proxy"])
def front(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    """Start a server; also return its number of ingress replicas. Of two, the Python proxy may send everything to
    one."""
    env, num_ingresses = request.param
    with serve_run(fake(step_delay_ms=30, ingress_replicas=num_ingresses), env=env) as server:
        yield server, num_ingresses


async def streamed(client: httpx.AsyncClient, i: int, begun: asyncio.Event) -> list[str] | httpx.TransportError:
    """Return the payloads of a stream, or how its connection broke."""
    payloads = []
    try:
        async with client.stream(
            "POST", "/v1/completions", json=completion(i, NUM_TOKENS) | {"stream": True}
        ) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line:
                    payloads.append(line.removeprefix("data: "))
                    begun.set()
    except httpx.TransportError as broken:
        return broken
    return payloads


async def whole(client: httpx.AsyncClient, i: int) -> httpx.Response:
    return await client.post("/v1/completions", json=completion(i, NUM_TOKENS))


def in_rotation(server: Server) -> int:
    """Return the ingress replicas that HAProxy sends requests to."""
    (haproxy, *_) = (pid for pid, name in members_of(server.process.pid).items() if name == "haproxy")
    entries = Path(f"/proc/{haproxy}/environ").read_bytes().decode().split("\0")
    environ = dict(entry.partition("=")[::2] for entry in entries)
    (page,) = Path(environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.glob("*/stats.sock")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(page))) as client:
        rows = csv.DictReader(client.get("http://haproxy/stats;csv").text.removeprefix("# ").splitlines())
        return sum(row["type"] == "2" and row["act"] == "1" and row["status"].startswith("UP") for row in rows)


async def until_in_rotation(server: Server, count: int, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while in_rotation(server) != count:
            await asyncio.sleep(0.1)


async def test_clients_are_told_of_the_end_of_an_ingress_replica_where_possible(
    front: tuple[Server, int],
) -> None:
    server, num_ingresses = front
    proxy_tells = num_ingresses == 1
    await until_replicas(server, INGRESS, num_ingresses)
    await until_free(server, 1)
    if not proxy_tells:
        await until_in_rotation(server, num_ingresses)
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.ensure_future(streamed(client, i, event)) for i, event in enumerate(begun)]
        answers = [asyncio.ensure_future(whole(client, i)) for i in range(NUM_WHOLE)]
        await asyncio.gather(*(event.wait() for event in begun))
        kill(replicas(server, INGRESS)[0])
        ended, told = await asyncio.gather(*streams), await asyncio.gather(*answers)
    cut = [stream for stream in ended if not is_whole(stream)]
    if proxy_tells:
        assert len(cut) == NUM_STREAMS
        assert {error_of(stream) for stream in cut} == {"replica_lost"}
        lost = [answer for answer in told if answer.status_code == 503]
        assert {answer.json()["error"]["code"] for answer in lost} == {"replica_lost"}
        assert {answer.headers["retry-after"] for answer in lost} == {"1"}
    else:
        assert 0 < len(cut) < NUM_STREAMS, "the other replica's streams are whole"
        assert [stream for stream in cut if not isinstance(stream, httpx.TransportError)] == [], "none looks complete"
        assert {answer.status_code for answer in told} == {200}, "what had no answer yet went to the other replica"


def is_whole(stream: list[str] | httpx.TransportError) -> bool:
    return isinstance(stream, list) and finish_reason(json.loads(stream[-2])) == "length"


def finish_reason(chunk: dict[str, Any]) -> Any:
    return chunk.get("choices", [{}])[0].get("finish_reason")


def error_of(stream: list[str] | httpx.TransportError) -> Any:
    assert isinstance(stream, list)
    assert stream[-1] == "[DONE]"
    return json.loads(stream[-2])["error"]["code"]
