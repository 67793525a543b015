"""Contracts of where spans go: nowhere and at no cost unless asked for; a missing exporter is reported at start.
Never opens a connection."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from pydantic import ValidationError

from serve_app.api.request_facts import EndedRequest, RequestFacts
from serve_app.api.timing.split import EndedTimes
from serve_app.app import build
from serve_app.settings.application import AppSettings
from serve_app.settings.tracing import TracingSettings
from serve_app.tracing import export
from serve_app.tracing import spans as spans_module
from serve_app.tracing.export import MissingExporter, make_tracer
from serve_app.tracing.spans import RequestTracer
from tests.serve_app.metrics.test_request_times import Turned

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.anyio


def without_exporter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(export, "_OTLP", "opentelemetry.exporter.no_such_package.http")


def test_tracing_is_off_by_default_and_then_nothing_of_opentelemetry_is_imported() -> None:
    code = """
import sys
from serve_app.api.ingress import create_app
from serve_app.settings.application import AppSettings
from serve_app.tracing.export import check_exporter, make_tracer
settings = AppSettings().tracing
check_exporter(settings)
print(make_tracer(settings, "model", "replica"), [name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "None []", done.stderr


def test_an_exporter_that_is_not_installed_ends_the_start_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without_exporter(monkeypatch)
    settings = AppSettings(tracing=TracingSettings(exporter="otlp"))
    with pytest.raises(MissingExporter, match=r"extra `tracing`.*\.\[tracing\]"):
        build(settings)
    with pytest.raises(MissingExporter, match=r"extra `tracing`.*\.\[tracing\]"):
        make_tracer(settings.tracing, "model", "replica")


def test_the_console_needs_no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    without_exporter(monkeypatch)
    build(AppSettings(tracing=TracingSettings(exporter="console")))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"exporter": "console", "endpoint": "http://localhost:4318"},
            "tracing.endpoint is http:.* but tracing.exporter is console: .* only with tracing.exporter otlp",
        ),
        ({"exporter": "otlp", "endpoint": "localhost:4318"}, "endpoint"),
        ({"exporter": "jaeger"}, "exporter"),
        ({"exporter": "otlp", "sample_ratio": 1.5}, "sample_ratio"),
        ({"exporter": "otlp", "service": "x"}, "service"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        AppSettings.model_validate({"tracing": given})


async def test_the_console_gets_a_line_of_json_for_each_span(capsys: pytest.CaptureFixture[str]) -> None:
    tracer = make_tracer(TracingSettings(exporter="console"), "org/tiny", "replica-1")
    assert tracer is not None
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    times = Turned()
    wall = EndedTimes(None, "r-1", "client_gone", times, times.now(), None)
    tracer(EndedRequest(scope, RequestFacts(), None, wall))
    tracer.flush()
    tracer.shutdown()
    (line,) = capsys.readouterr().out.splitlines()
    span = json.loads(line)
    assert span["name"] == "text_completion"
    assert span["resource"]["attributes"]["service.name"] == "chunkserve"
    assert span["resource"]["attributes"]["service.instance.id"] == "replica-1"
    assert span["attributes"]["error.type"] == "client_gone"


def test_a_service_that_the_environment_names_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-eu")
    tracer = make_tracer(TracingSettings(exporter="console"), "org/tiny", "replica-1")
    assert tracer is not None
    assert tracer.resource.attributes["service.name"] == "llm-eu"
    tracer.shutdown()


class Stuck(SpanExporter):
    """An exporter whose collector does not answer for now, and a replica that must not wait for it."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.has_answered = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.answers.wait(1)
        self.has_answered = True
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("end", [RequestTracer.flush, RequestTracer.shutdown])
def test_a_collector_that_does_not_answer_holds_a_replica_up_no_longer_than_the_limit(
    end: Callable[[RequestTracer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK takes no limit for a flush, and 30 s for its own end, in which the watchdog killed the replica."""
    monkeypatch.setattr(spans_module, "FLUSH_MS", 1)
    stuck, provider = Stuck(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(stuck))
    tracer = RequestTracer(provider, "tiny")
    provider.get_tracer("test").start_span("waits").end()
    end(tracer)
    assert not stuck.has_answered
    stuck.answers.set()
    provider.shutdown()
