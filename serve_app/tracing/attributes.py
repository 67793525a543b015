"""Collects the attributes of a request's span, by OpenTelemetry's conventions for generative AI, HTTP and errors.
Never records a prompt or an answer."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.request_facts import EndedRequest, RequestFacts
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import ChatRequest
from serve_app.errors.api_error import ApiError, clip

if TYPE_CHECKING:
    from serve_app.api.openai.choices import Choices

Value = str | bool | int | float | Sequence[str]
Attributes = dict[str, Value]

PROVIDER = "chunkserve"
_MAX_CHARS = 200
"""The length limit of a name that a client chose."""


_OPERATIONS = {"/completions": "text_completion", "/embeddings": "embeddings"}


def operation_of(path: str) -> str:
    return _OPERATIONS.get(path.removeprefix("/v1"), "chat")


def span_name(path: str, facts: RequestFacts) -> str:
    model = "" if facts.request is None else f" {clip(facts.request.model, _MAX_CHARS)}"
    return f"{operation_of(path)}{model}"


def attributes_of(ended: EndedRequest, path: str, model: str) -> Attributes:
    """Collect all attributes of a request. `model`: the name of the served model, unless the facts have it."""
    common: Attributes = {"gen_ai.operation.name": operation_of(path), "gen_ai.provider.name": PROVIDER}
    answer = _of_answer(ended, ended.facts.model_id or model)
    parts = (_of_http(ended, path), _of_request(ended.facts), answer, _of_error(ended))
    return reduce(operator.or_, parts, common) | _of_wall_time(ended)


def error_type(ended: EndedRequest) -> str | None:
    """Return the code of the error that the client got, instead of an answer or in the middle of it."""
    choices = ended.facts.choices
    error = ended.error or (None if choices is None else choices.error)
    if isinstance(error, ApiError):
        return error.code or str(error.status)
    if error is not None:
        return "internal_error"
    return None if ended.outcome == "complete" else ended.outcome


def status_code(ended: EndedRequest) -> int | None:
    """Return the response's status; None if the client left, because it may not have seen one."""
    if ended.outcome == "client_gone":
        return None
    if ended.error is None:
        return 200
    return ended.error.status if isinstance(ended.error, ApiError) else 500


def _of_http(ended: EndedRequest, path: str) -> Attributes:
    attributes: Attributes = {"http.request.method": ended.scope["method"], "http.route": path, "url.path": path}
    attributes["url.scheme"] = ended.scope.get("scheme", "http")
    if (status := status_code(ended)) is not None:
        attributes["http.response.status_code"] = status
    address, port = _server(ended.scope)
    return attributes | _given({"server.address": address, "server.port": port})


def _server(scope: Scope) -> tuple[str | None, int | None]:
    """Return the address and port as in the client's Host header, or else those to which this process is bound."""
    try:
        named = urlsplit(f"//{Headers(scope=scope).get('host', '')}")
        if named.hostname:
            return named.hostname, named.port
    except ValueError:  # the header is not a host and a port
        pass
    address, port = scope.get("server") or (None, None)
    return address, port


def _of_request(facts: RequestFacts) -> Attributes:
    request = facts.request
    if request is None:
        return {}
    if isinstance(request, EmbeddingRequest):
        encodings = None if request.encoding_format is None else [request.encoding_format]
        named = {"gen_ai.request.model": clip(request.model, _MAX_CHARS), "gen_ai.request.encoding_formats": encodings}
        return _given(named)
    wanted = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    several = request.num_choices if request.num_choices > 1 else None
    return _given(
        {
            "gen_ai.request.model": clip(request.model, _MAX_CHARS),
            "gen_ai.request.stream": bool(request.stream),
            "gen_ai.request.max_tokens": wanted or request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.top_k": request.top_k,
            "gen_ai.request.seed": request.seed,
            "gen_ai.request.presence_penalty": request.presence_penalty,
            "gen_ai.request.frequency_penalty": request.frequency_penalty,
            "gen_ai.request.stop_sequences": request.stops or None,
            "gen_ai.request.choice.count": several,
            "gen_ai.conversation.id": facts.session,
        }
    )


def _of_answer(ended: EndedRequest, model: str) -> Attributes:
    facts, times = ended.facts, ended.times
    if facts.choices is None or facts.answer_id is None:
        return {}
    attributes: Attributes = {"gen_ai.response.id": facts.answer_id, "gen_ai.response.model": model}
    if facts.request is not None and facts.request.stream and times.first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = times.first_token - times.arrived
    return attributes | _of_usage(facts.choices)


def _of_usage(choices: Choices) -> Attributes:
    """Collect the usage, of an incomplete answer as far as it came."""
    usage = choices.usage
    reasons = [reason for reason in choices.finish_reasons if reason is not None]
    return _given(
        {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.usage.reasoning.output_tokens": choices.reasoning_tokens,
        }
    )


def _of_error(ended: EndedRequest) -> Attributes:
    return _given({"error.type": error_type(ended)})


def _of_wall_time(ended: EndedRequest) -> Attributes:
    """Collect where the wall time went, a number of milliseconds for each cause."""
    timing = ended.wall.timing()
    return {f"chunkserve.time.{part.cause}_ms": part.ms for part in (*timing.own, *timing.slowed_by)}


def _given(attributes: Mapping[str, Value | None]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}
