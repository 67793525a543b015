"""Writes the response for a failure: OpenAI's envelope, or Anthropic's on its routes.
Never decides what has failed, nor its status."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from serve_app.errors.api_error import ApiError

REQUEST_ID = "chunkserve.request_id"
"""Key of the request's X-Request-Id in the scope."""

ANTHROPIC_PATH = "/messages"
"""The prefix of Anthropic's routes, which also exist under `/v1`."""
THREAD = "thread"
"""A field that asks the server to store the conversation. If a refusal has Anthropic's own code, its SDK continues
without the field."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API, including paths that do not exist."""
    path = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/v1")
    return bool(path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"))


def refusal(error: ApiError, scope: Scope) -> JSONResponse:
    body = anthropic_error(error, scope.get(REQUEST_ID)) if is_anthropic(scope) else error.body()
    return JSONResponse(body, error.status, headers=error.headers)


def anthropic_error(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Write Anthropic's envelope, which has no place for a field's name except the message."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    details: dict[str, Any] = {"type": _TYPES.get(error.status, "api_error"), "message": message}
    if error.param == THREAD:
        details["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
    return {"type": "error", "error": details, "request_id": request_id}
