"""Contracts of a request's spans, whatever becomes of it. Long: names, attributes, parents, times and errors of each.
Never sends a span anywhere: they are kept in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes, url_attributes
from opentelemetry.trace import SpanKind, StatusCode

from engine.protocol import AdapterRef, EngineError, EngineTimes, ErrorCode, FinishReason, TimeCause
from serve_app.adapters.names import AdapterNames
from serve_app.api.ingress import create_app
from serve_app.api.request_facts import EndedRequest, RequestFacts
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.api.timing.split import EndedTimes
from serve_app.auth.keys import Keys
from serve_app.channel.migration import Migration
from serve_app.settings.auth import ApiKey
from serve_app.tracing.spans import RequestTracer
from tests.serve_app.api.generation.test_tools import THINKER
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    ScriptedClient,
    Step,
    app_for,
    failed,
    finished,
    scheduled,
    tokens,
)
from tests.serve_app.metrics.test_request_times import Turned
from tests.support.conditions import until

pytestmark = pytest.mark.anyio

URL = "/v1/chat/completions"
TOO_LONG = CHAT | {"messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 10_000}
SECRET = "swordfish"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")
ANSWER: tuple[Step, ...] = ([scheduled(cached=3)], tokens("Bon"), tokens("jour"), [finished(cached=3)])
TIME = "chunkserve.time."
PARTS = ["gate", "engine.queue", "engine.prefill", "engine.decode"]


class Traced:
    """An app whose spans are kept."""

    def __init__(self, *script: Step, ratio: float = 1.0, model: Any = MODEL, **options: Any) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.client = ScriptedClient(*script)
        self.trace = RequestTracer(provider, model.id)
        self.app = create_app(self.client, Tokenizer.byte_level(), model, trace=self.trace, **options)

    def start(self, path: str, body: Any, *headers: tuple[str, str]) -> Exchange:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Exchange(self.app, "POST", path, data, (("content-type", "application/json"), *headers))

    async def ask(self, path: str, body: Any, *headers: tuple[str, str]) -> Answer:
        return await self.start(path, body, *headers).finish()

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    @property
    def server_span(self) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return span

    @property
    def told(self) -> Mapping[str, Any]:
        """The attributes, but for those of the wall time."""
        told = self.server_span.attributes or {}
        return {name: value for name, value in told.items() if not name.startswith(TIME)}

    @property
    def wall_time(self) -> Mapping[str, Any]:
        """Milliseconds by cause."""
        told = self.server_span.attributes or {}
        return {name.removeprefix(TIME): value for name, value in told.items() if name.startswith(TIME)}

    @property
    def parts(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.kind is SpanKind.INTERNAL]


# --- what a span says ------------------------------------------------------------------------------------------------


async def test_a_chat_has_a_server_span_that_says_what_was_asked_and_what_came_of_it() -> None:
    traced = Traced(*ANSWER)
    asked = {"max_completion_tokens": 9, "max_tokens": 99, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7}
    more = {"presence_penalty": 0.25, "frequency_penalty": 0.75, "stop": ["end"], "prompt_cache_key": "conversation-1"}
    answer = await traced.ask(URL, CHAT | asked | more, ("host", "llm.example:8443"))
    span = traced.server_span
    assert (span.name, span.kind, span.parent) == ("chat org/tiny", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(traced.told) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chunkserve",
        "gen_ai.request.model": MODEL.id,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.seed": 7,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.frequency_penalty": 0.75,
        "gen_ai.request.stop_sequences": ("end",),
        "gen_ai.conversation.id": "conversation-1",
        "gen_ai.response.id": answer.json["id"],
        "gen_ai.response.model": MODEL.id,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "http.request.method": "POST",
        "http.route": URL,
        "http.response.status_code": 200,
        "url.path": URL,
        "url.scheme": "http",
        "server.address": "llm.example",
        "server.port": 8443,
    }


async def test_a_span_says_where_the_wall_time_went_cause_by_cause() -> None:
    times = EngineTimes({TimeCause.QUEUE: 1e-3, TimeCause.DECODE: 2e-3})
    traced = Traced([scheduled()], tokens("Bonjour"), [replace(finished(), times=times)])
    await traced.ask(URL, CHAT)
    assert traced.wall_time.keys() >= {"queue_ms", "decode_ms", "server_ms"}
    begun, ended = traced.server_span.start_time, traced.server_span.end_time
    assert begun is not None
    assert ended is not None
    assert sum(traced.wall_time.values()) == pytest.approx((ended - begun) / 1e6, abs=0.05)


async def test_the_span_of_an_answer_that_a_stop_string_ended_waits_for_what_the_engine_tells() -> None:
    traced = Traced([scheduled()], tokens("Bonjour"), asyncio.Event())
    await traced.ask(URL, CHAT | {"stop": "jour"})
    assert not traced.spans
    await until(lambda: bool(traced.spans))
    assert "unrecorded_ms" in traced.wall_time


async def test_the_model_of_an_answer_is_the_one_that_the_answer_names() -> None:
    names = AdapterNames(MODEL, [AdapterRef("breton", "/breton", "0f")], aliases={"gpt-*": "breton"})
    traced = Traced(*ANSWER, adapters=names)
    answer = await traced.ask(URL, CHAT | {"model": "gpt-5"})
    assert (traced.told["gen_ai.request.model"], traced.told["gen_ai.response.model"]) == ("gpt-5", "breton")
    assert answer.json["model"] == "breton"


async def test_every_attribute_of_a_convention_has_the_conventions_name() -> None:
    """The names are written out here, because releases move the module that has them; a typing error shows here."""
    modules = (gen_ai_attributes, error_attributes, http_attributes, server_attributes, url_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    traced = Traced([scheduled()], tokens("<think>Hm"), [failed(EngineError(ErrorCode.STEP_FAILED, ""))], model=THINKER)
    many = {"n": 2, "stream": True, "stop": "x", "max_tokens": 5, "seed": 1, "top_k": 1, "top_p": 0.5, "temperature": 1}
    await traced.ask(URL, CHAT | many | {"presence_penalty": 1, "frequency_penalty": 1, "prompt_cache_key": "k"})
    assert set(traced.told) <= known
    assert len(traced.told) > 20


async def test_a_text_completion_is_another_operation_and_the_other_apis_are_chats() -> None:
    traced = Traced(*ANSWER)
    await traced.ask("/v1/completions", PROMPT)
    assert (traced.server_span.name, traced.told["gen_ai.operation.name"]) == (
        "text_completion org/tiny",
        "text_completion",
    )
    for path, body in (
        ("/v1/messages", {"model": MODEL.id, "max_tokens": 9, "messages": CHAT["messages"]}),
        ("/v1/responses", {"model": MODEL.id, "input": "hi"}),
    ):
        traced = Traced(*ANSWER)
        await traced.ask(path, body)
        assert (traced.server_span.name, traced.told["http.route"]) == ("chat org/tiny", path)


async def test_neither_prompts_nor_answers_are_recorded() -> None:
    traced = Traced([scheduled()], tokens(SECRET), [finished()])
    await traced.ask(URL, CHAT | {"messages": [{"role": "user", "content": SECRET}], "stream": True})
    await traced.ask("/v1/completions", PROMPT | {"prompt": SECRET, "echo": True, "logprobs": 1})
    assert len(traced.spans) > 2
    assert not [span.name for span in traced.spans if SECRET in span.to_json()]


async def test_a_stream_says_when_its_first_chunk_went_and_a_whole_answer_does_not() -> None:
    for stream in (True, False):
        traced = Traced(*ANSWER)
        await traced.ask(URL, CHAT | {"stream": stream})
        assert traced.told["gen_ai.request.stream"] is stream
        first = traced.told.get("gen_ai.response.time_to_first_chunk")
        assert (first is not None) is stream
        if first is not None:
            span = traced.server_span
            assert span.start_time is not None
            assert span.end_time is not None
            assert 0 < first <= (span.end_time - span.start_time) / 1e9


async def test_several_answers_are_one_span_with_the_reason_of_each_and_the_tokens_of_all() -> None:
    traced = Traced(*ANSWER)
    answer = await traced.ask(URL, CHAT | {"n": 3})
    assert traced.told["gen_ai.request.choice.count"] == 3
    assert traced.told["gen_ai.response.finish_reasons"] == ("stop",) * 3
    usage = answer.json["usage"]
    assert traced.told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert traced.told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 15
    assert [span.name for span in traced.parts] == PARTS


async def test_the_reasoning_tokens_of_a_model_that_thinks_are_recorded() -> None:
    traced = Traced([scheduled()], tokens("<think>Hm</think>Yes"), [finished()], model=THINKER)
    await traced.ask(URL, CHAT)
    assert traced.told["gen_ai.usage.reasoning.output_tokens"] == len("<think>Hm</think>")


# --- where it belongs ------------------------------------------------------------------------------------------------


async def test_a_span_is_the_child_of_the_callers_and_its_parts_are_its_own_children() -> None:
    traced = Traced(*ANSWER)
    await traced.ask(URL, CHAT, PARENT, ("tracestate", "vendor=1"))
    span = traced.server_span
    assert span.parent is not None
    assert span.context is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert span.parent.is_remote
    assert span.context.trace_state.get("vendor") == "1"
    assert [part.name for part in traced.parts] == PARTS
    for part in traced.parts:
        assert part.parent is not None
        assert part.parent.span_id == span.context.span_id
        assert part.context is not None
        assert part.context.trace_id == span.context.trace_id


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{SPAN_ID}-01", f"ff-{TRACE_ID}-{SPAN_ID}-01"])
async def test_a_malformed_parent_is_none(header: str) -> None:
    traced = Traced(*ANSWER)
    assert (await traced.ask(URL, CHAT, ("traceparent", header))).status == 200
    assert traced.server_span.parent is None


async def test_the_callers_choice_to_sample_wins_over_the_ratio() -> None:
    never, always = Traced(*ANSWER, ratio=0), Traced(*ANSWER, ratio=1)
    await never.ask(URL, CHAT)
    assert never.spans == ()
    await never.ask(URL, CHAT, PARENT)
    assert never.server_span.parent is not None
    await always.ask(URL, CHAT, ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00"))
    assert always.spans == ()


# --- where the time went ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_parts_follow_each_other_inside_the_span(stream: bool) -> None:
    traced = Traced(*ANSWER)
    await traced.ask(URL, CHAT | {"stream": stream})
    span, parts = traced.server_span, traced.parts
    assert [part.name for part in parts] == PARTS
    times = [(part.start_time or 0, part.end_time or 0) for part in parts]
    assert all(start <= end for start, end in times)
    edges = [span.start_time or 0, *(edge for pair in times for edge in pair), span.end_time or 0]
    assert edges == sorted(edges)
    assert [end for _, end in times[1:-1]] == [start for start, _ in times[2:]], "no gap while it is with the engine"


async def test_each_wait_at_the_gate_is_a_span_of_its_own() -> None:
    """The wait for a model to wake began, as a span, after it was over, and reached beyond the request's own end."""
    traced, times = Traced(), Turned(at=100.0)
    for begun, waits_s in ((101.0, 30.0), (132.0, 0.5)):
        times.at = begun
        with times.at_gate():
            times.at += waits_s
    times.at = 133.0
    scope = {"type": "http", "method": "POST", "path": URL, "headers": []}
    wall = EndedTimes(None, "r-1", "client_gone", times, times.now(), None)
    traced.trace(EndedRequest(scope, RequestFacts(), None, wall))
    arrived = traced.server_span.start_time or 0
    found = [(part.name, (part.start_time or 0) - arrived, (part.end_time or 0) - arrived) for part in traced.parts]
    assert [name for name, *_ in found] == ["gate", "gate"]
    assert [at / 1e9 for _, *pair in found for at in pair] == pytest.approx([1.0, 31.0, 32.0, 32.5])


async def test_an_answer_of_one_piece_has_no_decoding_and_one_that_never_ran_has_the_gate_alone() -> None:
    at_once = Traced([scheduled(), *tokens("a"), finished()])
    await at_once.ask(URL, CHAT)
    assert [part.name for part in at_once.parts] == PARTS[:3]
    refused = Traced(*ANSWER)
    await refused.ask(URL, TOO_LONG)
    assert refused.parts == []


async def test_a_move_to_another_engine_is_an_event_that_names_the_one_that_failed() -> None:
    class Attempt:
        replica_id = "engine-1"

        def __init__(self, *items: Any) -> None:
            self._items = list(items)

        async def take(self) -> Any:
            if isinstance(item := self._items.pop(0), Exception):
                raise item
            return item

        def close(self, *, complete: bool = False) -> None:
            pass

    attempts = [
        Attempt([scheduled()], tokens("a"), EngineError(ErrorCode.ENGINE_DEAD, "gone")),
        Attempt([scheduled()], tokens("b"), [finished(FinishReason.LENGTH)]),
    ]
    traced = Traced()
    migration = Migration(3, TIMEOUT_S, MODEL.max_model_len)
    traced.client.stream = lambda submission, *, session=None, record=None: migration.stream(  # type: ignore[method-assign]
        submission, lambda rest, avoid: attempts.pop(0), record
    )
    assert (await traced.ask(URL, CHAT | {"max_tokens": 2})).status == 200
    (event,) = traced.server_span.events
    assert event.name == "migration"
    assert dict(event.attributes or {}) == {"error.type": "engine_dead", "chunkserve.engine.replica_id": "engine-1"}
    span = traced.server_span
    assert (span.start_time or 0) <= event.timestamp <= (span.end_time or 0)


# --- what went wrong -------------------------------------------------------------------------------------------------


async def test_a_refusal_has_its_status_and_code_and_only_the_servers_faults_are_errors_of_the_span() -> None:
    refused = Traced(*ANSWER)
    await refused.ask(URL, TOO_LONG)
    assert (refused.told["http.response.status_code"], refused.told["error.type"]) == (400, "context_length_exceeded")
    assert refused.server_span.status.status_code is StatusCode.UNSET
    assert refused.told["gen_ai.request.max_tokens"] == 10_000
    assert "gen_ai.response.id" not in refused.told

    broken = Traced(EngineError(ErrorCode.STEP_FAILED, "broken"))
    await broken.ask(URL, CHAT)
    assert (broken.told["http.response.status_code"], broken.told["error.type"]) == (500, "step_failed")
    assert broken.server_span.status.status_code is StatusCode.ERROR


async def test_a_body_that_cannot_be_read_has_a_span_without_a_model() -> None:
    traced = Traced(*ANSWER)
    assert (await traced.ask(URL, b"{")).status == 400
    assert traced.server_span.name == "chat"
    assert traced.told["error.type"] == "invalid_json"


async def test_a_fault_of_ours_is_an_internal_error() -> None:
    traced = Traced(ValueError(SECRET))
    assert (await traced.ask(URL, CHAT)).status == 500
    assert (traced.told["http.response.status_code"], traced.told["error.type"]) == (500, "internal_error")
    assert SECRET not in traced.server_span.to_json()


async def test_a_stream_that_breaks_has_status_200_and_the_code_of_what_broke_it() -> None:
    traced = Traced([scheduled()], tokens("ab"), [failed(EngineError(ErrorCode.STEP_FAILED, "broken"))])
    assert (await traced.ask(URL, CHAT | {"stream": True})).status == 200
    assert (traced.told["http.response.status_code"], traced.told["error.type"]) == (200, "step_failed")
    assert traced.server_span.status.status_code is StatusCode.ERROR
    assert traced.told["gen_ai.usage.output_tokens"] == 2
    assert "gen_ai.response.finish_reasons" not in traced.told


async def test_a_client_that_leaves_has_a_span_that_says_so() -> None:
    never = asyncio.Event()
    traced = Traced([scheduled()], tokens("ab"), never)
    exchange = traced.start(URL, CHAT | {"stream": True})
    for _ in range(3):
        await exchange.next()
    exchange.disconnect()
    await exchange.task
    assert traced.told["error.type"] == "client_gone"
    assert "http.response.status_code" not in traced.told
    assert traced.told["gen_ai.usage.output_tokens"] == 2
    assert [part.name for part in traced.parts] == PARTS


async def test_who_has_no_key_gets_no_span() -> None:
    traced = Traced(*ANSWER, keys=Keys([ApiKey(tenant="ann", sha256="0" * 64)]))
    assert (await traced.ask(URL, CHAT)).status == 401
    assert traced.spans == ()


async def test_a_fault_in_tracing_breaks_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def trace(ended: EndedRequest) -> None:
        raise ZeroDivisionError

    exchange = Exchange(app_for(ScriptedClient(*ANSWER), trace=trace), "POST", URL, json.dumps(CHAT).encode())
    assert (await exchange.finish()).status == 200
    assert "could not be traced" in caplog.text
