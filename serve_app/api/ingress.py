"""Defines the HTTP routes of OpenAI's and Anthropic's APIs, as an ASGI app over an engine client. Long: all routes.
Never touches tokens or text itself, and knows neither Ray nor how the engine runs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Generic

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.protocol import EngineError, RequestRejected
from serve_app.adapters.names import AdapterNames
from serve_app.admission.gate import AdmissionTicket, Gate, GateSnapshot
from serve_app.api.admin.activity import activity_route
from serve_app.api.admin.adapters import AdapterRoutes
from serve_app.api.admin.control import Admin
from serve_app.api.anthropic.count import CountTokens
from serve_app.api.anthropic.form import read_messages
from serve_app.api.generation.completion import Completion
from serve_app.api.generation.constraint import Patiently
from serve_app.api.generation.field_grammars import refused
from serve_app.api.generation.live import Lifecycle, LiveRequests
from serve_app.api.generation.logprobs import json_chars, score_chars
from serve_app.api.generation.sealing import Seal
from serve_app.api.generation.submission import Prepared, prepare_chat, prepare_completion
from serve_app.api.http.asgi import RequestGuard, read_json_body, unless_client_leaves
from serve_app.api.http.cors import cors_middleware
from serve_app.api.http.generation_response import GenerationResponses
from serve_app.api.http.hint_header import TellsHints
from serve_app.api.http.json_text import json_response
from serve_app.api.http.offload import run_sized
from serve_app.api.http.turns import TenantTurns
from serve_app.api.measuring import FACTS, TIMES, MeasuresRequests
from serve_app.api.models.lane import Lane
from serve_app.api.models.lanes import Asked, Lanes
from serve_app.api.openai.choices import MAX_AT_ONCE, Choices
from serve_app.api.openai.embeddings import prepare_embeddings, read_embeddings
from serve_app.api.openai.forms import Answering, ParsedRequest, RequestT, read_chat, read_completion
from serve_app.api.openai.model_list import ANTHROPIC_VERSION, model_json, models_json
from serve_app.api.openai.responses.form import ResponseReader
from serve_app.api.openai.responses.kept_routes import KeptRoutes
from serve_app.api.openai.sse import send_stream
from serve_app.api.openai.text_routes import TextRoutes
from serve_app.api.openapi.about import about_routes
from serve_app.api.request_facts import RequestFacts, Trace
from serve_app.api.requests.deadline import HEADER as DEADLINE_HEADER
from serve_app.api.requests.deadline import Deadline, deadline_of, now
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.session import HEADER as SESSION_HEADER
from serve_app.api.requests.session import session_of
from serve_app.api.requests.targets import targets_of
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.api.timing.recent import RecentTimes
from serve_app.api.timing.routes import PATH as TIMING_PATH
from serve_app.api.timing.routes import TimingRoute
from serve_app.auth.keys import Keys, NeedsKey, tenant_of
from serve_app.engines.engine_client import EngineClient, ServedModel
from serve_app.engines.engine_load import EngineLoad
from serve_app.errors.api_error import ApiError, clip, to_api_error
from serve_app.errors.refusal import REQUEST_ID, refusal
from serve_app.metrics.exposition import CONTENT_TYPE, expose
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.request_times import RequestTimes
from serve_app.page.route import page_route
from serve_app.settings.cors import CorsSettings
from serve_app.settings.instance import instance_headers
from serve_app.store.memory import AnswerMemory

MAX_BODY_BYTES = 4 * 2**20
"""About a million tokens of text; a body is held in memory while it is read and parsed."""

CLIENT_STALL_TIMEOUT_S = 60.0
"""How long a client may read nothing of its answer."""

SSE_KEEP_ALIVE_S = 15.0
"""How long a stream may be silent. Proxies close a stream that is silent for a minute, some after half a minute."""

FLOAT_CHARS = 20
"""Approximate length of a vector's number as JSON."""

Read = Callable[[Lane, bytes, str], Awaitable[ParsedRequest[RequestT]]]
"""Reads a body for a model, given the name of the tenant that sent it."""
Prepare = Callable[[RequestT, str, Tokenizer, ServedModel, Patiently], Awaitable[list[list[Prepared]]]]


def _at_once(read: Callable[[bytes], ParsedRequest[RequestT]]) -> Read[RequestT]:
    """One that needs nothing but the body."""
    return _for_tenant(lambda _lane, body, _tenant: read(body))


def _for_tenant(read: Callable[[Lane, bytes, str], ParsedRequest[RequestT]]) -> Read[RequestT]:
    """One that looks nothing up."""

    async def read_body(lane: Lane, body: bytes, tenant: str) -> ParsedRequest[RequestT]:
        return await run_sized(len(body), lambda: read(lane, body, tenant))

    return read_body


class _Generate(Generic[RequestT]):
    """An endpoint that runs the model and answers streamed or whole. All such endpoints share it, so that they
    agree."""

    def __init__(
        self,
        context: _Context,
        read: Read[RequestT],
        prepare: Prepare[RequestT],
        id_prefix: str,
    ) -> None:
        self._context = context
        self._read: Read[RequestT] = read
        self._prepare: Prepare[RequestT] = prepare
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, tenant = now(), tenant_of(scope)
        lanes = self._context.lanes
        lanes.check_gates(tenant)
        with lanes.arriving(tenant) as arrival:
            body = await read_json_body(scope, receive, self._context.max_body_bytes)
            scope[TIMES].has_body()
            asked = await lanes.of_body(body)
            lane = asked.lane
            gate, facts = lane.gate, scope[FACTS]
            facts.model_id, facts.recorder = lane.model.id, lane.recorder
            # A fresh id even if the client names its request: the engine needs unique ids of live requests.
            request_id = f"{self._id_prefix}{uuid.uuid4().hex}"
            arrival.leave()
            try:
                with (
                    gate.enter(tenant) as ticket,
                    self._context.live.track(request_id, scope[REQUEST_ID]) as lifecycle,
                ):
                    admitted = _Admitted(request_id, arrived, asked, ticket, lifecycle, scope[TIMES], facts)
                    await unless_client_leaves(receive, self._answer(admitted, body, scope, receive, send))
            except EngineError as error:
                raise to_api_error(error, gate.retry_after_s()) from error

    async def _answer(self, admitted: _Admitted, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        headers, lane = Headers(scope=scope), admitted.lane
        if lane.sleeper is not None and admitted.asked.is_served:
            timeout_ms = admitted.asked.timeout_ms
            admitted.until(deadline_of(admitted.arrived, headers.get(DEADLINE_HEADER), timeout_ms))
            with admitted.lifecycle.bound(), admitted.times.at_gate():
                await lane.known()
        asked = await self._read(lane, body, admitted.ticket.tenant.name)
        request = asked.request
        lane.gate.check_priority(request.priority or 0, admitted.ticket.tenant)
        admitted.until(deadline_of(admitted.arrived, headers.get(DEADLINE_HEADER), request.timeout_ms))
        admitted.times.num_choices = request.num_choices
        session = session_of(headers.get(SESSION_HEADER), request.prompt_cache_key)
        facts = admitted.facts
        facts.request, facts.session, facts.answer_id = request, session, admitted.request_id
        model = self._context.lanes.served_by(lane, request.model)
        if model.adapter is not None and not model.adapter.digest:
            with admitted.lifecycle.bound():
                model = await lane.with_adapter(request.model)
        facts.model_id, facts.targets = model.id, targets_of(headers, request, model.targets)
        try:
            choices = facts.choices = await self._start(request, admitted, session, model)
        except ApiError as error:
            raise asked.renamed(error) from error
        answering = Answering(admitted.request_id, lane.tokenizer, model, choices, scope[REQUEST_ID])
        try:
            await self._send(asked, answering, scope, receive, send)
        except RequestRejected as error:
            if error.param != "grammar":
                raise
            raise asked.renamed(refused(choices.constrained_by, error.message)) from error
        except ApiError as error:
            raise asked.renamed(error) from error

    async def _send(
        self, asked: ParsedRequest[RequestT], answering: Answering, scope: Scope, receive: Receive, send: Send
    ) -> None:
        form, choices = asked.form(answering), answering.choices
        if asked.request.stream:
            await send_stream(send, choices, form.frames(), asked.renamed)
        else:
            pieces = await choices.whole()
            size = form.num_repeated
            size += sum(len(piece.text) + json_chars(piece.tokens or ()) for piece in pieces)
            size += sum(score_chars(prompt.scores or ()) for prompt in choices.prompts)
            size += FLOAT_CHARS * sum(map(len, choices.vectors))
            size += sum(len(prompt.token_ids) for prompt in choices.prompts)
            body = await run_sized(size, lambda: form.body(pieces))
            await form.keep(body)
            made = await run_sized(size, lambda: json_response(body))
            await made(scope, receive, send)

    async def _start(self, request: RequestT, admitted: _Admitted, session: str | None, model: ServedModel) -> Choices:
        """Prepare the request, and wait for places with the engines."""
        lane, ticket, lifecycle = admitted.lane, admitted.ticket, admitted.lifecycle
        patiently = partial(self._context.turns.run, ticket.tenant.name)
        with lifecycle.bound():
            groups = await self._prepare(request, admitted.request_id, lane.tokenizer, model, patiently)
        prompts = [group[0].submission for group in groups]
        if (deadline := lifecycle.deadline) is not None:
            lane.gate.check_deadline(prompts, deadline.left_s(), deadline.timeout_ms / 1000)
        num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        with lifecycle.bound(), admitted.times.at_gate():
            await lane.awake()
            await ticket.dispatched(num_tokens, sum(map(len, groups)), MAX_AT_ONCE)
        if session is None and request.num_choices > 1:
            session = admitted.request_id  # the same engine for all answers to a prompt, so that they share its blocks
        return await Choices.of(groups, lambda ready: self._completion(ready, admitted, session))

    def _completion(self, ready: Prepared, admitted: _Admitted, session: str | None) -> Completion:
        facts, tenant = admitted.facts, admitted.ticket.tenant.name
        named = facts.session or ""  # the client's own name: what only keeps choices together is no conversation
        submission = replace(ready.submission, tenant=tenant, session=named, **facts.targets)
        ready = replace(ready, submission=submission)
        request, lane = facts.request, admitted.lane
        thoughts, stops = None, None
        if isinstance(request, ChatRequest):
            thoughts, stops = lane.thoughts(request, ready), lane.stops(request, ready)
        return Completion(
            lane.client, ready, admitted.lifecycle, admitted.ticket, admitted.times, session, thoughts, stops
        )


@dataclass(frozen=True, slots=True)
class _Admitted:
    """What belongs to one request that was let in."""

    request_id: str
    arrived: float
    asked: Asked
    ticket: AdmissionTicket
    lifecycle: Lifecycle
    times: RequestTimes
    facts: RequestFacts

    @property
    def lane(self) -> Lane:
        return self.asked.lane

    def until(self, deadline: Deadline | None) -> None:
        self.lifecycle.until(deadline)
        self.times.deadline_at = None if deadline is None else deadline.at


@dataclass(frozen=True, slots=True)
class _Context:
    """Holds what the routes share, and has the small routes themselves."""

    lanes: Lanes
    max_body_bytes: int
    live: LiveRequests
    turns: TenantTurns = field(default_factory=TenantTurns)
    """For work on grammars."""

    async def list_models(self, request: Request) -> Response:
        listed = models_json(self.lanes.listed(), for_anthropic=ANTHROPIC_VERSION in request.headers)
        # Codex sends `client_version`, and treats a list without `models` as an error. An empty list is enough: an
        # entry would have to contain Codex's own instructions.
        return JSONResponse(listed | {"models": []} if "client_version" in request.query_params else listed)

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["model_id"]
        for_anthropic = ANTHROPIC_VERSION in request.headers
        return JSONResponse(model_json(name, self.lanes.served(name), for_anthropic=for_anthropic))

    async def health(self, _: Request) -> Response:
        """Liveness: an engine answers, or a model may sleep. Of several models, one without an engine does not take the
        others away. A draining server is alive, because a restart would cut off what is finishing."""
        found = await asyncio.gather(*(lane.client.check_health() for lane in self.lanes), return_exceptions=True)
        errors = [one for one in found if isinstance(one, Exception)]
        if len(errors) == len(found):
            # Always 503, whatever the error: a load balancer must see one status.
            cause = to_api_error(errors[0])
            raise ApiError(503, cause.message, type=cause.type, code=cause.code, headers=cause.headers) from errors[0]
        return Response(headers=instance_headers())

    async def ready(self, request: Request) -> Response:
        """Readiness: the server is alive, and lets new requests in."""
        for lane in self.lanes:
            lane.gate.check_open()
        return await self.health(request)

    async def load(self, _: Request) -> Response:
        found = await self.lanes.each(lambda lane: lane.client.load())
        gates = [lane.gate.snapshot() for lane in self.lanes]
        loads: list[dict[str, Any]] = [
            {"engines": [], "ingress": asdict(gate), **engines.body()}
            if isinstance(engines, ApiError)
            else {"engines": [asdict(snapshot) for snapshot in engines], "ingress": asdict(gate)}
            for engines, gate in zip(found, gates, strict=True)
        ]
        if not self.lanes.are_several:
            return JSONResponse(loads[0])
        models = {lane.model.id: load for lane, load in zip(self.lanes, loads, strict=True)}
        engines = [engine for load in loads for engine in load["engines"]]
        return JSONResponse({"engines": engines, "ingress": asdict(GateSnapshot.total(gates)), "models": models})

    def load_report(self) -> Mapping[str, float] | None:
        """Implements LoadReport. Requests at this replica's gates wait for the engines, too, so they are counted. Of
        several models, the fullest counts."""
        loads = [load for lane in self.lanes if (load := lane.engine_load()) is not None]
        if not loads:
            return None
        waiting = sum(load.num_waiting for load in loads) + sum(lane.gate.num_waiting for lane in self.lanes)
        usage = max(load.kv_cache_usage for load in loads)
        return {"kv_cache_usage_perc": round(usage, 4), "num_requests_waiting": waiting}

    async def metrics(self, _: Request) -> Response:
        found = await asyncio.gather(*(lane.client.metrics() for lane in self.lanes))
        scrapes = {lane.model.id: scrape for lane, scrape in zip(self.lanes, found, strict=True)}
        text = await run_sized(sum(scrape.num_chars for scrape in found), lambda: expose(scrapes))
        return Response(text, media_type=CONTENT_TYPE)


def _versioned(
    path: str, endpoint: Callable[..., Any], middleware: Sequence[Middleware], method: str = "GET"
) -> list[Route]:
    """Route `path` both with `/v1` and without it, for clients whose base URL lacks it."""
    return [Route(prefix + path, endpoint, methods=[method], middleware=middleware) for prefix in ("/v1", "")]


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own refusals: unknown routes and methods that are not allowed."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {clip(request.url.path, 200)}"
    return refusal(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})), request.scope)


async def _api_error(request: Request, error: Exception) -> Response:
    return refusal(to_api_error(error), request.scope)


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    model: ServedModel,
    *,
    gate: Gate | None = None,
    recorder: IngressRecorder | None = None,
    engine_load: Callable[[], EngineLoad | None] = lambda: None,
    adapters: AdapterNames | None = None,
    allow_lora_updates: bool = False,
    **shared: Any,
) -> Starlette:
    """Build the app of a single model. Without `gate` it lets everything in; without `engine_load` load balancers are
    told nothing. `adapters` may change later, through the adapter routes or from other replicas. `shared`: as for
    create_app_of."""
    gate = gate or Gate()
    names, recorder = adapters or AdapterNames(model), recorder or IngressRecorder(gate)
    lane = Lane(client, tokenizer, names, gate, recorder, engine_load, allow_lora_updates)
    return create_app_of([lane], **shared)


def create_app_of(
    served: Sequence[Lane],
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    client_stall_timeout_s: float = CLIENT_STALL_TIMEOUT_S,
    sse_keep_alive_s: float = SSE_KEEP_ALIVE_S,
    names_responses: bool = True,
    keys: Keys | None = None,
    live: LiveRequests | None = None,
    recent_times: RecentTimes | None = None,
    trace: Trace | None = None,
    strict: bool = False,
    drop_billing_header: bool = True,
    seal: Seal | None = None,
    memory: AnswerMemory | None = None,
    cors: CorsSettings | None = None,
) -> Starlette:
    """Build the app. It has no state besides its arguments, so that replicas are interchangeable. `served`: the models;
    requests that name none are for the first. Without `keys` anybody may use it, and nobody may use the admin routes;
    without `trace` no request is traced. `strict`: refuse hints that have no effect. `drop_billing_header`: keep
    Claude Code's billing header out of prompts. `seal`: encrypts a response's thoughts; without it they are not
    returned encrypted. `memory`: keeps responses; without it none is kept. `cors`: the web pages of other servers that
    may use the API."""
    lanes, keys = Lanes(served), keys or Keys()
    context = _Context(lanes, max_body_bytes, live or LiveRequests())
    first, recent_times = lanes.first, recent_times or RecentTimes()
    guard = [Middleware(NeedsKey, keys=keys)]
    reading = [*guard, Middleware(TellsHints, strict=strict, count=first.recorder.ignored)]
    generating = [
        Middleware(TellsHints, strict=strict, count=first.recorder.ignored),
        Middleware(GenerationResponses, keep_alive_s=sse_keep_alive_s, report=context.load_report),
        *guard,
        Middleware(MeasuresRequests, recorder=first.recorder, recent=recent_times, trace=trace),
    ]

    def read_message(lane: Lane, body: bytes, tenant: str) -> ParsedRequest[ChatRequest]:
        return read_messages(
            body,
            tenant,
            tokenizer=lane.tokenizer,
            model=lane.model,
            seal=seal,
            drop_billing_header=drop_billing_header,
        )

    async def read_response(lane: Lane, body: bytes, tenant: str) -> ParsedRequest[ChatRequest]:
        reader = ResponseReader(lane.model, lane.tokenizer, seal, memory, max_body_bytes, context.turns)
        return await reader.read(body, tenant)

    chat = _Generate(context, _at_once(read_chat), prepare_chat, "chatcmpl-")
    completions = _Generate(context, _at_once(read_completion), prepare_completion, "cmpl-")
    messages = _Generate(context, _for_tenant(read_message), prepare_chat, "msg_")
    responses = _Generate(context, read_response, prepare_chat, "resp_")
    embeddings = _Generate(context, _at_once(read_embeddings), prepare_embeddings, "embd-")
    count = CountTokens(lanes, max_body_bytes, seal, drop_billing_header).answer
    app = Starlette(
        routes=[
            *_versioned("/chat/completions", chat, generating, "POST"),
            *_versioned("/completions", completions, generating, "POST"),
            *_versioned("/responses", responses, generating, "POST"),
            *_versioned("/messages", messages, generating, "POST"),
            *_versioned("/embeddings", embeddings, generating, "POST"),
            *_versioned("/messages/count_tokens", count, reading, "POST"),
            *_versioned(TIMING_PATH, TimingRoute(first.client, recent_times).get_timing, guard),
            *_versioned("/models", context.list_models, guard),
            *_versioned("/models/{model_id:path}", context.get_model, guard),
            Route("/health", context.health),
            Route("/ready", context.ready),
            Route("/metrics", context.metrics),
            Route("/load", context.load, middleware=guard),
            activity_route(lanes),
            page_route(),
            *KeptRoutes(lanes, memory, max_body_bytes).routes(reading),
            *TextRoutes(lanes, max_body_bytes).routes(guard, reading),
            *about_routes(keys),
            *Admin(lanes, context.live).routes(keys),
            *AdapterRoutes(lanes).routes(keys),
        ],
        middleware=[
            cors_middleware(cors or CorsSettings(), needs_keys=keys.are_needed),
            Middleware(RequestGuard, stall_timeout_s=client_stall_timeout_s, names_responses=names_responses),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, EngineError: _api_error},
    )
    app.router.redirect_slashes = False  # a redirect would make clients repeat a POST as they please
    return app
