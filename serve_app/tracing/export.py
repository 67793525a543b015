"""Sends spans, and is the only module that imports OpenTelemetry's SDK, when tracing is on.
Never touches the process's global tracer, which is Ray's."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from serve_app.settings.tracing import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from serve_app.tracing.spans import RequestTracer

_OTLP = "opentelemetry.exporter.otlp.proto.http"


class MissingExporter(RuntimeError):
    """The exporter is not installed. The message says what to install."""


def check_exporter(settings: TracingSettings) -> None:
    """Raises MissingExporter if this machine cannot send spans as the settings want."""
    if settings.exporter == "otlp" and not _is_installed(_OTLP):
        raise MissingExporter(
            "tracing.exporter is otlp, but the exporter is not installed: install the extra `tracing`, in the checkout "
            "with `pip install --constraint constraints.txt '.[tracing]'`."
        )


def make_tracer(settings: TracingSettings, model: str, replica_id: str) -> RequestTracer | None:
    """Make the tracer; None if tracing is off.

    Raises:
        MissingExporter: see `check_exporter`.
    """
    if settings.exporter == "none":
        return None
    check_exporter(settings)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    from serve_app.api.openapi.about import package_version
    from serve_app.tracing.spans import RequestTracer

    named = {"service.name": "chunkserve", "service.version": package_version(), "service.instance.id": replica_id}
    if "OTEL_SERVICE_NAME" in os.environ:
        del named["service.name"]  # a value set here would win over the environment's
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(settings.sample_ratio),
        resource=Resource.create(named),
        shutdown_on_exit=False,  # the replica shuts it down
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings)))
    return RequestTracer(provider, model)


def _exporter(settings: TracingSettings) -> SpanExporter:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    if settings.exporter == "console":
        return ConsoleSpanExporter(out=sys.stdout, formatter=_line)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter: SpanExporter = OTLPSpanExporter(endpoint=settings.endpoint)
    return exporter


def _line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
