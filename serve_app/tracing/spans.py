"""Makes the span of one request and its child spans: the gate, and the engine's queue, prefill and decoding.
Never does anything before the request is over: spans use the times that were measured anyway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.request_facts import EndedRequest
from serve_app.metrics.request_times import RequestTimes
from serve_app.tracing.attributes import attributes_of, error_type, span_name, status_code

_propagator = TraceContextTextMapPropagator()
FLUSH_MS = 5000

Interval = tuple[str, float, float]
"""A name with a start and an end on the event loop's clock."""


class RequestTracer:
    """Implements Trace. `model`: the name of the served model."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("chunkserve")
        self._model = model

    def __call__(self, ended: EndedRequest) -> None:
        path = ended.scope["path"].removeprefix(ended.scope.get("root_path", ""))
        clock = _Clock(ended.times, ended.wall.ended)
        name, begun = span_name(path, ended.facts), clock.ns(ended.times.arrived)
        span = self._tracer.start_span(name, _parent(ended.scope), SpanKind.SERVER, start_time=begun)
        if not span.is_recording():
            return
        span.set_attributes(attributes_of(ended, path, self._model))
        code = status_code(ended)
        if ended.outcome == "incomplete" or (code is not None and code >= 500):
            span.set_status(Status(StatusCode.ERROR, error_type(ended)))
        for move in () if ended.facts.choices is None else ended.facts.choices.moves:
            attributes = {"error.type": str(move.code), "chunkserve.engine.replica_id": move.replica_id or "unknown"}
            span.add_event("migration", attributes, clock.ns(move.at))
        within = set_span_in_context(span)
        for part, start, end in _parts(ended.times, ended.wall.ended):
            self._tracer.start_span(part, within, start_time=clock.ns(start)).end(clock.ns(end))
        span.end(clock.ended_ns)

    @property
    def resource(self) -> Resource:
        """The resource in every span, which describes this replica."""
        return self._provider.resource

    def flush(self) -> None:
        """Send the waiting spans, for at most FLUSH_MS."""
        _in_time(self._provider.force_flush)

    def shutdown(self) -> None:
        """Send the waiting spans, for at most FLUSH_MS, and take no more."""
        _in_time(self._provider.shutdown)


def _in_time(call: Callable[[], object]) -> None:
    """Wait for a call, for at most FLUSH_MS. The SDK ignores a flush's limit (seen with 1.45), and while no collector
    answers it retries for half a minute."""
    thread = threading.Thread(target=call, name="spans", daemon=True)  # a daemon, so that the process can end
    thread.start()
    thread.join(FLUSH_MS / 1000)


def _parent(scope: Scope) -> Context:
    """Return the caller's span by W3C Trace Context; an empty context if its header is not well formed."""
    headers = Headers(scope=scope)
    carrier = {name: ",".join(headers.getlist(name)) for name in ("traceparent", "tracestate") if name in headers}
    return _propagator.extract(carrier, Context())


def _parts(times: RequestTimes, ended: float) -> Iterator[Interval]:
    """Yield the parts of a request's time. With several answers, decoding begins with the first token of the first and
    ends with the last."""
    for begun, done in times.gate_waits:
        yield "gate", begun, done
    marks = [("engine.queue", times.given), ("engine.prefill", times.scheduled), ("engine.decode", times.first_token)]
    reached = [(name, at) for name, at in marks if at is not None]
    if not reached:
        return
    over = times.returned_at if times.is_answered and times.returned_at is not None else ended
    for (name, begun), (_, done) in pairwise([*reached, ("", over)]):
        # An answer that is complete in its first piece was returned before its first token is sent.
        if begun < over:
            yield name, begun, min(done, over)


class _Clock:
    """Converts times on the event loop's clock to nanoseconds since 1970."""

    def __init__(self, times: RequestTimes, ended: float) -> None:
        self._epoch_ns = time.time_ns() - round(times.now() * 1e9)
        self.ended_ns = self.ns(ended)

    def ns(self, at: float) -> int:
        return self._epoch_ns + round(at * 1e9)
