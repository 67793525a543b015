"""Owns the proof that a real server's spans arrive, with their caller's trace,
and that a shutdown sends those that wait.
Never looks inside the server: spans are read where they were sent."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from loadtest.server import ROOT, Server, starting

pytestmark = pytest.mark.server

MODEL = "smollm2-135m-instruct"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WAIT_S = 60  # only ever reached by a failure
FAKE = {"engine": {"executor": "fake", "fake": {"step_delay_ms": 5}}, "engine_num_cpus": 0.25, "ingress_num_cpus": 0.1}
NAMES = {f"chat {MODEL}", "gate", "engine.queue", "engine.prefill", "engine.decode"}
TOKENS = 60
"""300 ms: on a busy machine five tokens came in one piece, and such an answer has no span of its decoding."""


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
    return httpx.post(f"{url}/v1/chat/completions", json=body | fields, headers=headers, timeout=60)


def has_exporter() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Run a collector of OTLP over HTTP; yield its URL, and the spans that came."""
    found: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(data)
            found.extend(span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
        finally:
            server.shutdown()
            thread.join()


def printed(server: Server) -> list[dict[str, Any]]:
    """Return the spans on the server's output; Ray puts the name of the process before each."""
    lines = (line[line.index('{"name"') :] for line in server.output.splitlines() if '{"name"' in line)
    spans = [json.loads(line[: line.rindex("}") + 1]) for line in lines]
    return [span for span in spans if span["context"]["trace_id"] == f"0x{TRACE_ID}"]


class Traced(NamedTuple):
    """What two applications of one server have sent by its end: one to its output, the other to a collector."""

    printed: list[dict[str, Any]]
    collected: list[Span]


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with collector() as (url, spans):
        config = yaml.safe_load((ROOT / "config.yaml").read_text())
        (application,) = config["applications"]
        exporters = {"/printing": {"exporter": "console"}}
        exporters |= {"/collected": {"exporter": "otlp", "endpoint": url}} if has_exporter() else {}
        config["applications"] = [
            application | {"name": prefix[1:], "route_prefix": prefix, "args": FAKE | {"tracing": exporter}}
            for prefix, exporter in exporters.items()
        ]
        with starting(config, {}) as server:
            for prefix in exporters:
                server.wait_until_ready(f"{prefix}/health")
            assert ask(f"{server.url}/printing", stream=True).status_code == 200
            if has_exporter():
                assert ask(f"{server.url}/collected", stream=True).status_code == 200
                assert ask(f"{server.url}/collected", temperature=9).status_code == 400
            deadline = time.monotonic() + WAIT_S
            while len(shown := printed(server)) < len(NAMES):
                assert time.monotonic() < deadline, server.output
                time.sleep(0.2)
            assert server.end() == 0
        yield Traced(shown, spans)


@pytest.mark.slow
def test_a_servers_output_has_the_spans_of_its_requests(traced: Traced) -> None:
    spans = traced.printed
    assert {span["name"] for span in spans} == NAMES
    (asked,) = [span for span in spans if span["kind"] == "SpanKind.SERVER"]
    assert asked["parent_id"] == f"0x{SPAN_ID}"
    assert asked["attributes"]["gen_ai.usage.output_tokens"] == TOKENS
    assert {span["parent_id"] for span in spans if span is not asked} == {asked["context"]["span_id"]}


@pytest.mark.slow
@pytest.mark.skipif(not has_exporter(), reason="needs the extra `tracing`")
def test_a_collector_gets_the_spans_of_each_request_and_a_shutdown_sends_what_waits(traced: Traced) -> None:
    spans = traced.collected
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert sorted(span.name for span in spans) == sorted([*NAMES, "chat"]), "no model is read from a refused body"
    asked = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert {span.parent_span_id.hex() for span in asked} == {SPAN_ID}
    told = [{one.key: one.value for one in span.attributes} for span in asked]
    assert sorted(one["http.response.status_code"].int_value for one in told) == [200, 400]
    (whole,) = [one for one in told if "gen_ai.response.id" in one]
    assert whole["gen_ai.usage.output_tokens"].int_value == TOKENS
    assert [value.string_value for value in whole["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
