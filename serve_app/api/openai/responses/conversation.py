"""Owns what a Responses request means as a chat request.
Never renders it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import ValidationError

from serve_app.api.generation.image_prompt import image_names
from serve_app.api.openai.forms import renamed
from serve_app.api.openai.responses.chosen import choice_of
from serve_app.api.openai.responses.schema import ResponsesRequest, SchemaFormat, TextOptions
from serve_app.api.openai.responses.toolbox import Toolbox
from serve_app.api.openai.responses.turns import Turns
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.strict_model import Unsupported
from serve_app.errors.api_error import from_validation

Json = dict[str, Any]
_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "stream",
    "parallel_tool_calls",
    "prompt_cache_key",
)
NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "messages": "input",
}
"""What a chat request calls differently."""


class _Chat(ChatRequest):
    """A chat request that no client writes."""

    hints: ClassVar[Unsupported] = {}

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"


def as_chat(
    request: ResponsesRequest, messages: Sequence[Json], toolbox: Toolbox, template_options: Json | None
) -> ChatRequest:
    """Return the chat with the same answer. `messages`: the request's items and those that it continues, as messages.

    Raises:
        ApiError: the chat request is not valid.
    """
    system = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    fields = {name: getattr(request, name) for name in _SAME} | {
        "messages": [*system, *messages],
        "max_tokens": request.max_output_tokens,
        "logprobs": request.shows_logprobs,
        "top_logprobs": request.top_logprobs,
        "tools": [offer.definition() for offer in toolbox.offers] or None,
        "tool_choice": choice_of(request, toolbox),
        "response_format": _format(request.text),
        "chat_template_kwargs": template_options,
    }
    try:
        return _Chat.model_validate(fields)
    except ValidationError as error:
        raise renamed(from_validation(error), toolbox.names() | NAMES) from error


def names_of(chat: ChatRequest, toolbox: Toolbox, turns: Turns) -> dict[str, str]:
    """Map the names of the chat request to those of the Responses request, where they differ."""
    return image_names(chat.messages, turns.images) | toolbox.names() | NAMES


def _format(text: TextOptions | None) -> Any:
    if text is None or not isinstance(text.format, SchemaFormat):
        return None if text is None or text.format is None else {"type": text.format.type}
    return {"type": "json_schema", "json_schema": {"name": text.format.name, "schema": text.format.schema_}}
