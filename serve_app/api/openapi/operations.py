"""Owns the list of the app's operations: what each takes, what it may answer, and who may use it.
Never registers a route; a test compares the list with the app's routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel

from engine.protocol import MAX_TARGET_MS
from serve_app.api.admin import activity
from serve_app.api.admin.adapters import LoadAdapterRequest, UnloadAdapterRequest
from serve_app.api.admin.control import AbortRequest
from serve_app.api.anthropic import answer_schema as anthropic
from serve_app.api.anthropic.schema import CountTokensRequest, MessagesRequest
from serve_app.api.openai import answer_schema as answers
from serve_app.api.openai.responses import answer_schema as responses
from serve_app.api.openai.responses.includes import Includable
from serve_app.api.openai.responses.listing import MAX_LISTED, ORDERS
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.text_routes import MODEL_PARAMETER
from serve_app.api.requests.deadline import HEADER as DEADLINE_HEADER
from serve_app.api.requests.deadline import MAX_TIMEOUT_MS
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import ChatRequest, CompletionRequest
from serve_app.api.requests.session import HEADER as SESSION_HEADER
from serve_app.api.requests.session import PATTERN
from serve_app.api.requests.targets import TPOT_HEADER, TTFT_HEADER
from serve_app.api.requests.text_schema import DetokenizeRequest, TokenizeRequest

Parameter = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`answer`: the JSON of a 200. `chunk`: the JSON of a stream's events, if a 200 may be a stream; `events`: their
    framing. `media_type`: that of a 200, "" for an empty one. `errors`: the statuses besides 500 and those that follow
    from `needs`. `tells_hints`: a header of each answer may name the request's ignored hints."""

    method: Literal["get", "post", "delete"] = "get"
    path: str
    summary: str
    needs: Literal["nothing", "api key", "admin key"] = "api key"
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    error: type[BaseModel] = answers.ErrorEnvelope
    events: str = "`data: <JSON>` each, comments in between, `data: [DONE]` at the end"
    parameters: tuple[Parameter, ...] = ()
    tells_hints: bool = False


_BODY = (400, 408, 413, 415)
_HEADERS: tuple[Parameter, ...] = (
    {
        "name": DEADLINE_HEADER,
        "in": "header",
        "description": "How long the client waits for the whole answer; the smaller of it and `timeout_ms` counts.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    },
    {
        "name": TPOT_HEADER,
        "in": "header",
        "description": "As the field `slo_tpot_ms`; the shorter of the two counts.",
        "schema": {"type": "number", "minimum": 1, "maximum": MAX_TARGET_MS},
    },
    {
        "name": TTFT_HEADER,
        "in": "header",
        "description": "As the field `slo_ttft_ms`; the shorter of the two counts.",
        "schema": {"type": "number", "minimum": 1, "maximum": MAX_TARGET_MS},
    },
    {
        "name": SESSION_HEADER,
        "in": "header",
        "description": "Requests of one session go to the same engine as long as its load allows.",
        "schema": {"type": "string", "pattern": f"^{PATTERN}$"},
    },
)
_MODEL_ID: Parameter = {
    "name": "model_id",
    "in": "path",
    "required": True,
    "description": "The name may have slashes.",
    "schema": {"type": "string"},
}
_RESPONSE_ID: Parameter = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "description": "Of a response that is kept.",
    "schema": {"type": "string"},
}
_REQUEST_ID: Parameter = {
    "name": "request_id",
    "in": "path",
    "required": True,
    "description": "The `id` of an answer, or the X-Request-Id of a request, that ended lately.",
    "schema": {"type": "string"},
}
_INCLUDE: Parameter = {
    "name": "include",
    "in": "query",
    "description": "A hint.",
    "schema": {"type": "array", "items": {"type": "string", "enum": list(get_args(Includable))}},
}
_PAGE: tuple[Parameter, ...] = (
    {
        "name": "limit",
        "in": "query",
        "description": "Most items of one answer.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 20},
    },
    {
        "name": "order",
        "in": "query",
        "description": "From the first or from the last.",
        "schema": {"type": "string", "enum": list(ORDERS), "default": "desc"},
    },
    {"name": "after", "in": "query", "description": "The item before, by its id.", "schema": {"type": "string"}},
)


def _generation(
    path: str, summary: str, body: type[BaseModel], answer: type[BaseModel], chunk: type[BaseModel]
) -> Operation:
    errors = (*_BODY, 404, 429, 503, 504)
    return Operation(
        method="post",
        path=path,
        summary=summary,
        body=body,
        answer=answer,
        chunk=chunk,
        errors=errors,
        parameters=_HEADERS,
        tells_hints=True,
    )


def _text(path: str, summary: str, body: type[BaseModel], answer: type[BaseModel]) -> Operation:
    errors = (*_BODY, 404, 429, 503)
    return Operation(
        method="post", path=path, summary=summary, body=body, answer=answer, errors=errors, tells_hints=True
    )


def _admin(name: str, summary: str, answer: type[BaseModel]) -> Operation:
    return Operation(
        method="post", path=f"/admin/{name}", summary=summary, answer=answer, errors=(503,), needs="admin key"
    )


def _adapters(verb: str, summary: str, body: type[BaseModel], *more_errors: int) -> Operation:
    errors = (*_BODY, 403, 404, *more_errors, 503)
    path = f"/v1/{verb}_lora_adapter"
    return Operation(
        method="post", path=path, summary=summary, body=body, errors=errors, needs="admin key", media_type="text/plain"
    )


_CHAT = "Answer a conversation, whole or as a stream."
_COMPLETE = "Continue a text, whole or as a stream."
_RESPOND = "Answer items, whole or as a stream, and keep the answer for requests that refer to it."
_MESSAGE = "Answer a conversation as Anthropic's API does, whole or as a stream."
_COUNT = "Count the tokens of a conversation's prompt."
_NAMED_EVENTS = "`event: <type>` and `data: <JSON>` each, comments in between"
_TOKENIZE = "Encode a text or a conversation as token ids."
_DETOKENIZE = "Decode token ids to text."

_VERSIONED: tuple[Operation, ...] = (
    _generation("/v1/chat/completions", _CHAT, ChatRequest, answers.ChatCompletion, answers.ChatCompletionChunk),
    _generation("/v1/completions", _COMPLETE, CompletionRequest, answers.Completion, answers.CompletionChunk),
    replace(
        _generation("/v1/responses", _RESPOND, ResponsesRequest, responses.ResponseAnswer, responses.ResponseEvent),
        events=_NAMED_EVENTS,
    ),
    Operation(
        path="/v1/responses/{response_id}",
        summary="A response that is kept.",
        answer=responses.ResponseAnswer,
        errors=(400, 404, 429, 503),
        parameters=(_RESPONSE_ID, _INCLUDE),
        tells_hints=True,
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Keep a response no longer.",
        answer=responses.DeletedResponse,
        errors=(404, 429, 503),
        parameters=(_RESPONSE_ID,),
        tells_hints=True,
    ),
    Operation(
        path="/v1/responses/{response_id}/input_items",
        summary="What a response that is kept was made from, with the conversation before it.",
        answer=responses.ItemList,
        errors=(400, 404, 429, 503),
        parameters=(_RESPONSE_ID, *_PAGE, _INCLUDE),
        tells_hints=True,
    ),
    replace(
        _generation("/v1/messages", _MESSAGE, MessagesRequest, anthropic.MessageAnswer, anthropic.Event),
        error=anthropic.ErrorAnswer,
        events=_NAMED_EVENTS,
    ),
    replace(
        _text("/v1/messages/count_tokens", _COUNT, CountTokensRequest, anthropic.TokenCount),
        error=anthropic.ErrorAnswer,
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        summary="Compute the vectors of texts, if the server's `pooling` is set.",
        body=EmbeddingRequest,
        answer=answers.Embeddings,
        errors=(*_BODY, 404, 429, 503, 504),
        parameters=_HEADERS,
        tells_hints=True,
    ),
    Operation(
        path="/v1/requests/{request_id}/timing",
        summary="Say why a request was slow: its wall time, divided by cause.",
        answer=answers.RequestTiming,
        errors=(404,),
        parameters=(_REQUEST_ID,),
    ),
    Operation(
        path="/v1/models",
        summary="List the served models by all their names, with their adapters and aliases.",
        answer=answers.ModelList,
    ),
    Operation(
        path="/v1/models/{model_id}",
        summary="Describe a served model, an adapter, or an alias of either.",
        answer=answers.Model,
        errors=(404,),
        parameters=(_MODEL_ID,),
    ),
)
"""The operations under `/v1`."""

UNVERSIONED = tuple(replace(one, path=one.path.removeprefix("/v1")) for one in _VERSIONED)
"""The same routes again, for clients whose base URL has no version."""

OPERATIONS: tuple[Operation, ...] = (
    *_VERSIONED,
    *UNVERSIONED,
    _text("/tokenize", _TOKENIZE, TokenizeRequest, answers.Tokens),
    _text("/v1/tokenize", _TOKENIZE, TokenizeRequest, answers.Tokens),
    _text("/detokenize", _DETOKENIZE, DetokenizeRequest, answers.Detokenized),
    _text("/v1/detokenize", _DETOKENIZE, DetokenizeRequest, answers.Detokenized),
    Operation(
        path="/tokenizer_info",
        summary="Describe a model's tokenizer.",
        answer=answers.TokenizerInfo,
        errors=(404,),
        parameters=(MODEL_PARAMETER,),
    ),
    Operation(path="/health", summary="Liveness: an engine answers.", needs="nothing", media_type="", errors=(503,)),
    Operation(
        path="/ready",
        summary="Readiness: the server accepts new requests.",
        needs="nothing",
        media_type="",
        errors=(503,),
    ),
    Operation(
        path="/metrics", summary="Metrics of all replicas, for Prometheus.", needs="nothing", media_type="text/plain"
    ),
    Operation(
        path=activity.PATH,
        summary="Show what each replica is doing: its load, its speed, its last steps.",
        answer=answers.Activity,
        needs="nothing",
        errors=(400,),
        parameters=(activity.PARAMETER,),
    ),
    Operation(path="/load", summary="Show the engines' load, and the gate's.", answer=answers.Load, errors=(503,)),
    Operation(path="/version", summary="Show the server's version.", answer=answers.Version, needs="nothing"),
    Operation(
        path="/", summary="A playground, and a live view of the replicas.", needs="nothing", media_type="text/html"
    ),
    Operation(path="/openapi.json", summary="This document.", needs="nothing"),
    Operation(path="/docs", summary="This document, as a page.", needs="nothing", media_type="text/html"),
    Operation(
        method="post",
        path="/admin/abort",
        summary="End a request.",
        needs="admin key",
        body=AbortRequest,
        answer=answers.Aborted,
        errors=(*_BODY, 404, 503),
    ),
    _adapters("load", "Load an adapter on every engine.", LoadAdapterRequest, 409),
    _adapters("unload", "Unload an adapter; running requests keep it.", UnloadAdapterRequest),
    _admin("drain", "Finish running requests, and refuse new ones.", answers.Draining),
    _admin("resume", "Accept new requests again.", answers.Draining),
    _admin(
        "reset_prefix_cache",
        "Drop the cached prefixes that no live request uses, in memory and on disk.",
        answers.DroppedBlocks,
    ),
)
