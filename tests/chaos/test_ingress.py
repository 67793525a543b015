"""Owns what a client sees of the end of an ingress replica: by HAProxy, which cannot append to a stream, and by Ray
Serve's Python proxy, which can. Never expects a stream of a lost ingress replica to go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtest.server import Server
from tests.chaos.support import INGRESS, completion, fake, kill, replicas, until_free, until_replicas
from tests.support.serve_process import PYTHON_PROXY, serve_run

pytestmark = [pytest.mark.anyio, pytest.mark.chaos]

NUM_STREAMS, NUM_WHOLE, NUM_TOKENS = 12, 12, 150


@pytest.fixture(params=[{}, PYTHON_PROXY], ids=["HAProxy", "Python proxy"])
def front(request: pytest.FixtureRequest) -> Iterator[tuple[Server, bool]]:
    with serve_run(fake(step_delay_ms=30, ingress_replicas=2), env=request.param) as server:
        yield server, request.param == PYTHON_PROXY


async def streamed(client: httpx.AsyncClient, i: int, begun: asyncio.Event) -> list[str] | httpx.TransportError:
    """The payloads of a stream, or how its connection broke."""
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


async def test_the_end_of_an_ingress_replica_is_told_wherever_it_can_be(front: tuple[Server, bool]) -> None:
    server, proxy_survives = front
    await until_replicas(server, INGRESS, 2)
    await until_free(server, 1)
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.ensure_future(streamed(client, i, event)) for i, event in enumerate(begun)]
        answers = [asyncio.ensure_future(whole(client, i)) for i in range(NUM_WHOLE)]
        await asyncio.gather(*(event.wait() for event in begun))
        kill(replicas(server, INGRESS)[0])
        ended, told = await asyncio.gather(*streams), await asyncio.gather(*answers)
    cut = [stream for stream in ended if not is_whole(stream)]
    assert 0 < len(cut) < NUM_STREAMS, "the other replica's streams are whole"
    if proxy_survives:
        assert {error_of(stream) for stream in cut} == {"replica_lost"}
        assert {answer.status_code for answer in told} == {200, 503}
        lost = [answer for answer in told if answer.status_code == 503]
        assert {answer.json()["error"]["code"] for answer in lost} == {"replica_lost"}
        assert {answer.headers["retry-after"] for answer in lost} == {"1"}
    else:
        assert all(isinstance(stream, httpx.RemoteProtocolError) for stream in cut), "none looks complete"
        assert {answer.status_code for answer in told} == {200}, "what had no answer yet went to the other replica"


def is_whole(stream: list[str] | httpx.TransportError) -> bool:
    return isinstance(stream, list) and finish_reason(json.loads(stream[-2])) == "length"


def finish_reason(chunk: dict[str, Any]) -> Any:
    return chunk.get("choices", [{}])[0].get("finish_reason")


def error_of(stream: list[str] | httpx.TransportError) -> Any:
    assert isinstance(stream, list)
    assert stream[-1] == "[DONE]"
    return json.loads(stream[-2])["error"]["code"]
