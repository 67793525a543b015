"""Owns a Responses request's hints that no schema can name: those that depend on a value, a tool, an item or the model.
Never reads anything else that the request asks for."""

from __future__ import annotations

from typing import Any

from serve_app.api.generation.sealing import Seal
from serve_app.api.openai.responses.includes import LOGPROBS, SEALED_THOUGHTS
from serve_app.api.openai.responses.replays import UnreadItem
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.toolbox import Toolbox
from serve_app.api.requests.effort import ThinkingWishes, thinking_options
from serve_app.api.requests.hints import ignore_or_refuse
from serve_app.api.requests.strict_model import UNSUPPORTED
from serve_app.api.text.chat_template import ChatTemplate
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError

Json = dict[str, Any]


def pass_over(name: str, param: str, text: str) -> None:
    """Ignore a hint. `name`: what we call it. `param`: its place in the request. `text`: why it has no effect.

    Raises:
        ApiError: the server is strict.
    """
    ignore_or_refuse(name, f"{param}: {text}", param)


def unsupported(param: str, text: str) -> ApiError:
    return ApiError(400, f"{param}: {text}", param=param, code=UNSUPPORTED)


def pass_over_hints(request: ResponsesRequest, toolbox: Toolbox, *, seal: Seal | None) -> Seal | None:
    """Name what the request asks for and does not get. `seal`: seals thoughts, if the model has any. Return it if the
    request asks for sealed thoughts.

    Raises:
        ApiError: the server is strict.
    """
    for number, value in enumerate(request.include or ()):
        if value != LOGPROBS and (value != SEALED_THOUGHTS or seal is None):
            pass_over(f"include.{value}", f"include.{number}", f"{value} is not given by this server")
    for place, tool in toolbox.hosted:
        pass_over(f"tools.{tool.type}", f"{place}.type", f"this server runs no {tool.type}")
    for number, item in enumerate(() if isinstance(request.input, str) else request.input):
        if isinstance(item, UnreadItem):
            pass_over(f"input.{item.type}", f"input.{number}", f"items of type {item.type} are not read by this server")
    return seal if SEALED_THOUGHTS in (request.include or ()) else None


def with_effort(
    request: ResponsesRequest, template: ChatTemplate | None, model: ServedModel
) -> tuple[ResponsesRequest, Json | None]:
    """Return the request with the effort that applies, and the chat template's options for it.

    Raises:
        ApiError: the server is strict.
    """
    if request.reasoning is None or request.reasoning.effort is None:
        return request, None
    asked = ThinkingWishes(efforts={"reasoning.effort": request.reasoning.effort})
    told = thinking_options(asked, template, (), thinks=model.reasoning_parser is not None)
    return request.model_copy(update={"reasoning": None}) if told.ignored else request, told.options or None
