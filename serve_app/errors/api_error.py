"""Turns every failure into an HTTP status and OpenAI's error envelope, with one table for the engine's codes.
Never shows a client the server's internals: details of faults go to the log, and every message is bounded."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from engine.protocol import EngineError, ErrorCode, RequestRejected

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 100
MAX_LISTED_ERRORS = 5
_MAX_MISTAKE_CHARS = 400
"""The length limit of one mistake's text, long enough for a list of types."""
_NO_NUMBER = ("int_type", "int_from_float", "float_type")
"""Mistakes of another type than a number."""
_MAX_SHOWN_CHARS = 20
_LONG_NUMBER = re.compile(r"\d{21,}", re.ASCII)
"""More digits than an unsigned integer of 64 bits has."""
_LONG_WORD = re.compile(r"\S{121,}")
"""Longer than a clipped field name with the characters around it."""
INVALID_REQUEST = "invalid_request_error"
_KINDS = {"requests": "requests at a time", "tokens": "queued prompt tokens"}
_SETTINGS = {"requests": "admission.max_concurrent_requests", "tokens": "admission.max_queued_tokens"}
_RETRY_WAKING_S = 10.0
"""After a model could not be woken: whatever is in its way takes longer than a queue."""
_RETRY_SOON_S = 1.0
"""For refusals without a measured drain rate."""


class ApiError(Exception):
    """A failure as the client sees it. `details` are extra keys of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, int] | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = clip(shortened(message), MAX_MESSAGE_CHARS)
        self.type = type
        self.param = None if param is None else clip(param, MAX_PARAM_CHARS)
        self.code = code
        self.headers = headers or {}
        self.details = details or {}

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.details}


@dataclass(frozen=True, slots=True)
class _Rule:
    status: int
    type: str
    code: str
    headers: dict[str, str] | None = None
    public_message: str | None = None
    """Shown instead of the engine's message; None if that is about the request, and may be shown."""
    retry: bool = False
    """The request may succeed later; the response says when to retry."""


ENGINE_RULES: dict[ErrorCode, _Rule] = {
    ErrorCode.EMPTY_PROMPT: _Rule(400, INVALID_REQUEST, "empty_prompt"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: _Rule(400, INVALID_REQUEST, "context_length_exceeded"),
    # OpenAI's code for a prompt that can never fit: agents that react by shortening their prompt should do so here,
    # too.
    ErrorCode.KV_CAPACITY_EXCEEDED: _Rule(400, INVALID_REQUEST, "context_length_exceeded"),
    ErrorCode.INVALID_PARAMETER: _Rule(400, INVALID_REQUEST, "invalid_value"),
    ErrorCode.QUEUE_FULL: _Rule(503, "server_overloaded", "queue_full", retry=True),
    ErrorCode.DRAINING: _Rule(
        503, "service_unavailable", "draining", None, "This replica of the server is stopping.", retry=True
    ),
    # 504 and not 408, which clients retry: a second attempt would be just as late.
    ErrorCode.DEADLINE_EXCEEDED: _Rule(504, "timeout", "deadline_exceeded", {"x-should-retry": "false"}),
    ErrorCode.PREPARATION_FAILED: _Rule(
        500, "server_error", "preparation_failed", None, "The server failed to prepare the prompt."
    ),
    ErrorCode.ADAPTER_UNAVAILABLE: _Rule(503, "server_error", "adapter_unavailable", retry=True),
    # Clients retry a 409, too, and would load again what has just been unloaded.
    ErrorCode.ADAPTER_WITHDRAWN: _Rule(409, INVALID_REQUEST, "adapter_withdrawn", {"x-should-retry": "false"}),
    ErrorCode.GRAMMAR_LIMIT_EXCEEDED: _Rule(400, INVALID_REQUEST, "grammar_limit_exceeded"),
    ErrorCode.STEP_FAILED: _Rule(500, "server_error", "step_failed", None, "The engine failed to compute a step."),
    ErrorCode.ENGINE_DEAD: _Rule(503, "server_error", "engine_dead", None, "The engine is not running.", retry=True),
}


def to_api_error(error: Exception, retry_after_s: float = _RETRY_SOON_S) -> ApiError:
    """Translate any exception. One that is not a client's mistake is logged here, once, with its traceback.

    `retry_after_s`: when to retry what the engine refuses only for now.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return _from_engine(error, retry_after_s)
    logger.error("unexpected failure while serving a request", exc_info=error)
    return ApiError(500, "The server failed unexpectedly.", type="server_error", code="internal_error")


def _from_engine(error: EngineError, retry_after_s: float) -> ApiError:
    rule = ENGINE_RULES[error.code]
    if rule.status >= 500:
        # Refusals come in bursts under load, and are not faults.
        level = logging.DEBUG if isinstance(error, RequestRejected) else logging.WARNING
        logger.log(level, "engine: %s: %s", error.code, error.message)
    message = rule.public_message or error.message
    param = error.param if isinstance(error, RequestRejected) else None
    if rule.code == "context_length_exceeded":
        # For max_tokens, the engine's limit is what the prompt leaves, and not the context length.
        limit = error.limit if isinstance(error, RequestRejected) and param == "prompt" else None
        return context_length_exceeded(message, param=param, limit=limit)
    headers = retry_headers(retry_after_s) if rule.retry else rule.headers
    return ApiError(rule.status, message, type=rule.type, code=rule.code, param=param, headers=headers)


def retry_headers(wait_s: float) -> dict[str, str]:
    """Write when to retry: in whole seconds for all clients, and in milliseconds for OpenAI's."""
    return {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def overloaded(kind: Literal["requests", "tokens"], limit: int, wait_s: float) -> ApiError:
    """Refuse a request because the deployment's limit is reached, in the same way as an engine with a full queue.

    `limit`: that of one ingress replica, which is its share of the deployment's.
    """
    text = f"The request queue is full: this ingress replica takes {limit} {_KINDS[kind]} ({_SETTINGS[kind]})."
    return ApiError(503, text, type="server_overloaded", code="queue_full", headers=retry_headers(wait_s))


def rate_limited(kind: Literal["requests", "tokens"], limit: int, left: int, wait_s: float) -> ApiError:
    """Refuse a request because its tenant's own limit is reached. The headers besides Retry-After are OpenAI's."""
    headers = retry_headers(wait_s) | {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(left),
        f"x-ratelimit-reset-{kind}": f"{math.ceil(wait_s * 1000)}ms",
    }
    text = f"Rate limit reached: this API key may have {limit} {_KINDS[kind]}."
    return ApiError(429, text, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def too_urgent(priority: int, least: int) -> ApiError:
    """Refuse a request that would go before others by more than its tenant may."""
    text = f"priority: the server takes {least} and greater numbers from this client, but it is {priority}."
    return ApiError(400, text, param="priority", code="invalid_value")


def cannot_wake(model: str, waited_s: float, why: str | None = None) -> ApiError:
    """Refuse a request for a model that has no engine and could not be woken. `why`: unless it only took too long."""
    name = clip(model, MAX_PARAM_CHARS)
    reason = f"no engine of it was ready within {waited_s:g} s (wake_timeout_s)" if why is None else why
    text = f"The model `{name}` has no engine and could not be woken: {reason}."
    headers = retry_headers(_RETRY_WAKING_S)
    return ApiError(503, text, type="service_unavailable", param="model", code="model_asleep", headers=headers)


def aborted() -> ApiError:
    """Report an abort. Not a 503, which clients and proxies retry: somebody wanted this request to end."""
    text = "The request was aborted by an administrator."
    return ApiError(500, text, type="server_error", code="aborted", headers={"x-should-retry": "false"})


def context_length_exceeded(
    message: str, *, param: str | None, limit: float | None, n_prompt_tokens: int | None = None
) -> ApiError:
    """Refuse a request as too long. Agent frameworks search for "maximum context length", and read the two numbers."""
    if "maximum context length" not in message:
        message = f"This request exceeds the maximum context length. {message}"
    numbers = {"n_prompt_tokens": n_prompt_tokens, "n_ctx": limit}
    details = {name: int(number) for name, number in numbers.items() if number is not None}
    return ApiError(400, message, param=param, code="context_length_exceeded", details=details)


def model_not_found(requested: str, *served: str) -> ApiError:
    """`served`: the models that there are."""
    name, known = clip(requested, MAX_PARAM_CHARS), ", ".join(f"`{model}`" for model in served)
    message = f"The model `{name}` does not exist. Could not find it here; this server serves {known}."
    return ApiError(404, message, param="model", code="model_not_found")


def from_validation(error: ValidationError) -> ApiError:
    """List the first few mistakes in one message. Their inputs are left out, except small values: a body of 4 KB must
    not cause an answer of 20 MB."""
    mistakes = error.errors(include_url=False)
    lines = [f"{_dotted(item) or 'body'}: {_message(item)}" for item in mistakes[:MAX_LISTED_ERRORS]]
    if len(mistakes) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(mistakes) - MAX_LISTED_ERRORS} more")
    first = mistakes[0]
    code = {"missing": "missing_required_parameter"}.get(first["type"], "invalid_value")
    code = first.get("ctx", {}).get("code", code)
    return ApiError(400, "; ".join(lines), param=_dotted(first), code=code)


def _message(item: Any) -> str:
    # pydantic's own message would name the Python class.
    text = "should be an object" if item["type"] == "model_type" else clip(item["msg"], _MAX_MISTAKE_CHARS)
    return f"{text}, but it is {json.dumps(item['input'])}" if _shows_its_value(item) else text


def _shows_its_value(item: Any) -> bool:
    value = item["input"]
    if not item["type"].endswith(_NO_NUMBER):
        return _is_small_number_out_of_range(item)
    return isinstance(value, bool | float | None) or (isinstance(value, str) and len(value) <= _MAX_SHOWN_CHARS)


def _is_small_number_out_of_range(item: Any) -> bool:
    # Python refuses to write an integer of more than 4,300 digits.
    return bool(item["type"].startswith(("greater_than", "less_than")) and abs(item["input"]) < 10**20)


def _dotted(item: Any) -> str | None:
    """Write a field's path, as `messages.0.role`. The tags of unions, which pydantic adds as `<tag>`, are left out."""
    path = [str(part) for part in item["loc"] if not str(part).startswith("<")]
    path += [item["ctx"]["field"]] if "field" in item.get("ctx", {}) else []
    return clip(".".join(path), MAX_PARAM_CHARS) or None


def shortened(message: str) -> str:
    """Shorten long values in a message; whoever sent them knows them."""
    message = _LONG_NUMBER.sub(lambda match: f"{match[0][:10]}… ({len(match[0])} digits)", message)
    return _LONG_WORD.sub(lambda match: clip(match[0], MAX_PARAM_CHARS), message)


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
