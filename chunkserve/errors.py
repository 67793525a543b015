"""Owns what the library raises for settings, models and requests.
Never carries an HTTP status: the library has the server's codes, and no server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.checkpoints.model_cache import ModelError
from engine.config import ConfigError

if TYPE_CHECKING:
    from engine.protocol import EngineError
    from serve_app.errors.api_error import ApiError

__all__ = [
    "ConfigError",
    "ModelError",
    "RequestError",
    "RequestFailed",
    "RequestRefused",
    "closed",
    "of_another_process",
    "of_request",
]

_OF_THE_SERVER = 500
"""Statuses from here on are not the request's fault."""


class RequestError(Exception):
    """A request was not answered. Others are not affected.

    `code`: the server's code for the error, such as `context_length_exceeded`. `param`: the name of the field at fault,
    if one is.
    """

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message, code, param)
        self.message = message
        self.code = code
        self.param = param

    def __str__(self) -> str:
        return self.message


class RequestRefused(RequestError):
    """The request can never be answered as it is. The message names the field, the limit and the value."""


class RequestFailed(RequestError):
    """The request was right, and its answer is not complete: its deadline has passed, or the engine failed or ended."""


def closed() -> RequestFailed:
    return RequestFailed("This engine does not run: it was closed, or not started.", "closed")


def of_another_process() -> RequestFailed:
    return RequestFailed("This engine belongs to another process: make one after the fork.", "closed")


def of_request(error: ApiError | EngineError) -> RequestError:
    """Return the library's error for one of the engine's or the API's."""
    from engine.protocol import EngineError, RequestRejected
    from serve_app.errors.api_error import to_api_error

    told = to_api_error(error)
    if told.status < _OF_THE_SERVER:
        return RequestRefused(told.message, told.code, told.param)
    own = isinstance(error, EngineError) and not isinstance(error, RequestRejected)  # here nothing is to be hidden
    return RequestFailed(str(error) if own else told.message, told.code, told.param)
