"""With direct streaming, Ray's builder makes our replica the one that answers HTTP, behind Ray's own HAProxy.
Never runs a model: what is tested is the way of a stream from the engine to a client, and of a client's end back."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from loadtest.server import Server, free_port, starting
from tests.support.ray_llm import FAKE, ON_CPU, SERVER, environment, ingress_fails, ray_config

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.anyio]

MODEL = "direct"
REPLY = "It is Paris."
STEP_MS = 50
MANY = 4000
"""Tokens of an answer that takes minutes: it is over only because somebody ended it."""
LLM_CONFIG: dict[str, Any] = {
    "model_loading_config": {"model_id": MODEL},
    "engine_kwargs": {"chunkserve": {"engine": FAKE | {"fake": {"step_delay_ms": STEP_MS, "reply": REPLY}}}},
    "deployment_config": {"num_replicas": 1},
    "server_cls": SERVER,
    **ON_CPU,
}
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if why := ingress_fails():
        pytest.skip(why)  # Ray's router of such requests is made as its ingress is
    config = ray_config(LLM_CONFIG)
    del config["applications"][0]["args"]["ingress_deployment_config"]  # there is no ingress of Ray's
    directory = tempfile.mkdtemp(prefix="hap", dir="/tmp")  # short: HAProxy's sockets live there
    try:
        with starting(config, environment() | _direct(directory)) as started:
            started.wait_until_ready("/v1/models")
            yield started
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _direct(directory: str) -> dict[str, str]:
    """Return the variables of direct streaming, with an HAProxy that shares no port or file with another."""
    ports = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
    return {
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # half a minute at the end of the test otherwise
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": directory,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        **{name: str(free_port()) for name in ports},
    }


def test_a_chat_is_streamed_by_the_replica_itself_and_is_the_whole_answer(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    with client, client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = list(stream)
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert "".join(pieces) == REPLY
    assert len(pieces) > 1, "the tokens come one by one, and not as one text"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert last.usage is not None
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=ASK, timeout=60)
    assert whole.json()["choices"][0]["message"]["content"] == REPLY
    assert whole.json()["usage"]["completion_tokens"] == last.usage.completion_tokens
    assert whole.headers["x-request-id"]


def test_refusals_are_those_of_this_project(server: Server) -> None:
    """Ray's own ingress has another text, and no such route as /tokenizer_info."""
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | {"temperature": -1}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    unknown = httpx.post(f"{server.url}/v1/chat/completions", json=ASK | {"model": "nobody"}, timeout=60)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert httpx.get(f"{server.url}/tokenizer_info", timeout=60).json()["model"] == MODEL


async def test_a_client_that_leaves_ends_its_stream_in_the_engine(server: Server) -> None:
    """The engine would compute the answer for minutes more, for nobody."""
    body = ASK | {"stream": True, "ignore_eos": True, "max_tokens": MANY}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            while '"content":"' not in (line := await anext(lines)) or '"content":""' in line:
                assert "error" not in line
            assert (await load(client))["num_running"] == 1
        async with asyncio.timeout(60):
            while (left := await load(client))["num_running"] or left["num_held_blocks"]:
                await asyncio.sleep(0.05)
    assert left["num_steps"] < MANY


async def load(client: httpx.AsyncClient) -> dict[str, Any]:
    (engine,) = (await client.get("/load")).json()["engines"]
    found: dict[str, Any] = engine
    return found
