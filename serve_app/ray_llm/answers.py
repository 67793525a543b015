"""Makes the objects that Ray's ingress reads from our own server's answers.
Never changes a value; a field that Ray's type cannot hold is left out."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from serve_app.errors.api_error import ApiError


def read_answer(kind: Any, body: bytes) -> Any:
    """Read a whole answer as an object of `kind`. vLLM's types differ from OpenAI's in fields that have no content
    here, such as `annotations`, which is a list there and an object here.

    Raises:
        ValidationError: `kind` cannot do without a field that it does not take.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        content = json.loads(body)
        for one in error.errors(include_url=False, include_input=False, include_context=False):
            _leave_out(content, one["loc"])
        return kind.model_validate(content)


def _leave_out(content: Any, path: tuple[int | str, ...]) -> None:
    *parents, name = path
    for parent in parents:
        content = content[parent]
    content.pop(name)


def error_object(types: Any, status: int, body: bytes) -> Any:
    """Make the object with whose code Ray's ingress answers, from a refusal of ours."""
    return _error(types, status, json.loads(body)["error"])


def refusal_object(types: Any, error: ApiError) -> Any:
    """Make the same object from an error."""
    return _error(types, error.status, error.body()["error"])


def _error(types: Any, status: int, error: dict[str, Any]) -> Any:
    info = types.ErrorInfo(message=error["message"], type=error["type"], param=error.get("param"), code=status)
    return types.ErrorResponse(error=info)
