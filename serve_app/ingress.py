"""Owns the HTTP routes: OpenAI's API as an ASGI app over an engine client.
Never touches tokens or text itself, and knows neither Ray nor how the engine runs."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Generic

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.protocol import EngineError
from serve_app.asgi import RequestGuard, read_json_body, unless_client_leaves
from serve_app.completion import Completion, whole_text
from serve_app.deadline import HEADER as DEADLINE_HEADER
from serve_app.deadline import Deadline, deadline_of, now
from serve_app.engine_client import EngineClient, ServedModel
from serve_app.errors import ApiError, clip, model_not_found, to_api_error
from serve_app.logprobs import json_chars
from serve_app.offload import run_sized
from serve_app.response import ChatShape, Envelope, Shape, TextShape, model_json
from serve_app.schema import ChatRequest, CompletionRequest, RequestT, parse_request
from serve_app.sse import send_stream
from serve_app.submission import Prepared, prepare_chat, prepare_completion
from serve_app.tokenizer import Tokenizer

MAX_BODY_BYTES = 4 * 2**20
"""About a million tokens of text; a body is held in memory while it is read and parsed."""

Prepare = Callable[[RequestT, str, Tokenizer, ServedModel], Awaitable[Prepared]]


class _Generate(Generic[RequestT]):
    """An endpoint that answers with generated text, streamed or whole. One class, so that both endpoints agree."""

    def __init__(
        self, context: _Context, kind: type[RequestT], prepare: Prepare[RequestT], shape: Shape, id_prefix: str
    ) -> None:
        self._context = context
        self._kind = kind
        self._prepare = prepare
        self._shape = shape
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = now()
        body = await read_json_body(scope, receive, self._context.max_body_bytes)
        await unless_client_leaves(receive, self._answer(arrived, body, scope, receive, send))

    async def _answer(self, arrived: float, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = await run_sized(len(body), lambda: parse_request(self._kind, body))
        deadline = deadline_of(arrived, Headers(scope=scope).get(DEADLINE_HEADER), request.timeout_ms)
        completion, envelope = await self._start(request, deadline)
        if request.stream:
            await send_stream(send, completion, envelope, request.include_usage)
        else:
            piece = await whole_text(completion)
            size = json_chars(piece.tokens or ())
            response = await run_sized(size, lambda: JSONResponse(envelope.body(piece, completion.usage)))
            await response(scope, receive, send)

    async def _start(self, request: RequestT, deadline: Deadline | None) -> tuple[Completion, Envelope]:
        context = self._context
        if request.model != context.model.id:
            raise model_not_found(request.model, context.model.id)
        # Fresh even where the client names its request: ids of live requests are unique in the engine.
        request_id = f"{self._id_prefix}-{uuid.uuid4().hex}"
        ready = await self._prepare(request, request_id, context.tokenizer, context.model)
        submission = ready.submission
        if deadline is not None:
            submission = replace(submission, timeout_s=deadline.left_s())
        completion = Completion(context.client, submission, ready.detokenizer, request.stops, ready.echo, deadline)
        return completion, Envelope(request_id, context.model.id, self._shape)


class _Context:
    """What the routes share, and the small routes themselves."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, model: ServedModel, max_body_bytes: int) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.model = model
        self.max_body_bytes = max_body_bytes

    async def list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_json(self.model)]})

    async def get_model(self, request: Request) -> Response:
        if request.path_params["model_id"] != self.model.id:
            raise model_not_found(request.path_params["model_id"], self.model.id)
        return JSONResponse(model_json(self.model))

    async def health(self, _: Request) -> Response:
        try:
            await self.client.check_health()
        except Exception as error:
            # Whatever it is, a load balancer must see one status.
            told = to_api_error(error)
            raise ApiError(503, told.message, type=told.type, code=told.code, headers=told.headers) from error
        return Response()

    async def load(self, _: Request) -> Response:
        return JSONResponse({"engines": [asdict(snapshot) for snapshot in await self.client.load()]})


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, not this method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {clip(request.url.path, 200)}"
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


async def _api_error(_: Request, error: Exception) -> Response:
    return to_api_error(error).response()


def create_app(
    client: EngineClient, tokenizer: Tokenizer, model: ServedModel, *, max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """Build the app. It has no state of its own besides its arguments, so that replicas are interchangeable."""
    context = _Context(client, tokenizer, model, max_body_bytes)
    chat = _Generate(context, ChatRequest, prepare_chat, ChatShape(), "chatcmpl")
    completions = _Generate(context, CompletionRequest, prepare_completion, TextShape(tokenizer.token_text), "cmpl")
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", context.list_models),
            Route("/v1/models/{model_id:path}", context.get_model),
            Route("/health", context.health),
            Route("/load", context.load),
        ],
        middleware=[Middleware(RequestGuard)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, EngineError: _api_error},
    )
    app.router.redirect_slashes = False  # a redirect would make clients repeat a POST as they please
    return app
