"""Owns the proof that one scrape of a real server covers all its replicas, and equals what was asked of it.
Never looks inside the server, except to stop a process of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.server import Server
from tests.support.serve_process import members_of, serve_run

pytestmark = pytest.mark.server

MODEL = "smollm2-135m-instruct"
WAIT_S = 60  # only ever reached by a failure
NUM_TOKENS = 12

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: Server) -> Series:
    answer = httpx.get(f"{server.url}/metrics", timeout=30)
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def activity(server: Server, query: str = "") -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/activity{query}", timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def total(series: Series, name: str, **labels: str) -> float:
    """Add up a metric over all replicas."""
    return sum(value for (found, have), value in series.items() if found == name and labels.items() <= have)


def replicas(series: Series, label: str) -> set[str]:
    return {dict(labels)[label] for _, labels in series if label in dict(labels)}


def ask(server: Server, *, stream: bool, **fields: Any) -> int:
    """Send a request and read it to its end; return its status."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": stream}
    return httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=120).status_code


def until(server: Server, condition: Callable[[Series], bool]) -> Series:
    """Scrape until the condition is true; return that scrape."""
    deadline = time.monotonic() + WAIT_S
    while not condition(series := scrape(server)):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.2)
    return series


def told_load(server: Server) -> dict[str, float]:
    """Return what a load balancer is told, as soon as the ingress replica that answers has an engine's report."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 0, "echo": True}
    deadline = time.monotonic() + WAIT_S
    while True:
        headers = {"endpoint-load-metrics-format": "JSON"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        if told := answer.headers.get("endpoint-load-metrics"):
            return dict(json.loads(told.removeprefix("JSON "))["named_metrics"])
        assert time.monotonic() < deadline, "no engine has reported"
        time.sleep(0.2)


def processes_of(server: Server, deployment: str) -> list[int]:
    found = []
    for pid in members_of(server.process.pid):
        with suppress(OSError):  # ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            found += [pid] if command.startswith(f"ray::ServeReplica:chunkserve:{deployment}") else []
    return found


@pytest.mark.slow
def test_a_scrape_of_two_ingresses_and_two_engines_equals_the_requests_made_and_outlives_an_engine() -> None:
    engine = {"executor": "fake", "fake": {"step_delay_ms": 5}}
    with serve_run({"engine": engine, "engine_replicas": 2, "ingress_replicas": 2}) as server:
        # A server answers as soon as one replica of each kind is there.
        first = until(server, lambda series: len(replicas(series, "engine")) == len(replicas(series, "ingress")) == 2)
        assert total(first, "vllm:request_success_total") == 0, "the warm-up does not count as a request"
        # A gateway's endpoint picker reads a single series, however many engines there are.
        read = [labels for name, labels in first if name == "chunkserve:requests_waiting_per_engine"]
        assert read == [frozenset({("model_name", MODEL)})]

        with ThreadPoolExecutor(8) as pool:
            answered = list(pool.map(lambda number: ask(server, stream=number % 2 == 0), range(40)))
        refused = [ask(server, stream=False, model="other"), ask(server, stream=True, temperature=9)]
        assert Counter([*answered, *refused]) == {200: 40, 404: 1, 400: 1}

        # Whole answers are counted when the ingress has sent them, which their clients may learn first.
        after = until(server, lambda series: total(series, "chunkserve:requests_total") == 42)
        assert total(after, "vllm:request_success_total", finished_reason="length") == 40
        assert total(after, "vllm:request_success_total") == 40
        assert total(after, "vllm:generation_tokens_total") == 40 * NUM_TOKENS
        assert total(after, "vllm:time_to_first_token_seconds_count") == 40
        assert total(after, "vllm:e2e_request_latency_seconds_count") == 40
        assert total(after, "chunkserve:requests_total", outcome="complete") == 40
        assert total(after, "chunkserve:e2e_request_latency_seconds_count") == 40
        assert total(after, "chunkserve:router_prompt_tokens_total") == total(after, "vllm:prompt_tokens_total") > 0
        assert total(after, "chunkserve:router_overlap_tokens_total") <= total(after, "vllm:prompt_tokens_total")
        assert total(after, "chunkserve:channel_frames_total") > 0
        assert total(after, "chunkserve:replicas_missing") == 0
        assert all(value > 0 for key, value in after.items() if key[0] == "vllm:generation_tokens_total"), "both work"

        told = activity(server)
        assert {engine["engine"] for engine in told["engines"]} == replicas(after, "engine")
        assert {ingress["ingress"] for ingress in told["ingresses"]} == replicas(after, "ingress")
        assert all(engine["steps"] for engine in told["engines"])
        known = "&".join(f"after={engine['engine']}:{engine['steps'][-1]['id']}" for engine in told["engines"])
        assert [engine["steps"] for engine in activity(server, f"?{known}")["engines"]] == [[], []]

        greedy = {"prompt": "hello", "temperature": 0}
        body = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True, **greedy}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        for stream in (False, True):
            assert ask(server, stream=stream, stop=text[1:3], **greedy | {"max_tokens": 1000}) == 200
        ended = until(server, lambda series: total(series, "vllm:request_success_total") == 43)
        by_reason = {
            r: total(ended, "vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort")
        }
        assert by_reason == {"stop": 2, "length": 41, "abort": 0}

        numbers = told_load(server)
        assert numbers.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
        assert 0 <= numbers["kv_cache_usage_perc"] <= 1

        stopped, _ = processes_of(server, "Engine")
        os.kill(stopped, signal.SIGSTOP)
        try:
            during = scrape(server)
            seen = activity(server)
        finally:
            os.kill(stopped, signal.SIGKILL)
        assert total(during, "chunkserve:replicas_missing", deployment="engine") == 1
        assert len(replicas(during, "engine")) == 1
        assert len(replicas(during, "ingress")) == 2
        assert (len(seen["engines"]), len(seen["ingresses"]), seen["num_missing"]) == (1, 2, 1)


@pytest.mark.slow
def test_scrapes_and_lookers_on_neither_keep_an_idle_engine_nor_wake_one() -> None:
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_to_zero_delay_s": 2}
    with serve_run({"engine": {"executor": "fake"}, "autoscaling": scaling}) as server:
        assert ask(server, stream=False) == 200
        until(server, lambda series: not replicas(series, "engine"))
        for _ in range(20):
            series = scrape(server)
            assert replicas(series, "engine") == set()
            assert activity(server)["engines"] == []
            time.sleep(0.2)
        assert total(series, "chunkserve:replicas_missing") == 0
        assert total(series, "chunkserve:requests_total", outcome="complete") == 1
        assert ask(server, stream=False) == 200, "a request does wake one"
        assert len(replicas(scrape(server), "engine")) == 1
