"""Defines the requests of /tokenize and /detokenize, which have vLLM's form.
Never reads text or tokens. A field is honoured, or refused by name, as in serve_app.api.requests.schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, RootModel, Tag, ValidationError

from serve_app.api.requests.effort import VALUE_HINTS
from serve_app.api.requests.messages import Message, Tools
from serve_app.api.requests.prompt_schema import TokenId
from serve_app.api.requests.schema import ChatRequest
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.thinking_fields import ThinkingFields
from serve_app.api.requests.tool_choice import ToolChoice
from serve_app.errors.api_error import from_validation


class TokenizePrompt(StrictModel):
    """A text, which is encoded as in /v1/completions."""

    unsupported: ClassVar[Unsupported] = {"messages": ()}
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    """Add the special tokens that the model's post-processor puts around a text, which is the default."""
    return_token_strs: bool | None = None


class TokenizeMessages(ThinkingFields):
    """A conversation, which is encoded as in /v1/chat/completions, with the same fields."""

    value_hints: ClassVar[Mapping[str, str]] = VALUE_HINTS
    unsupported: ClassVar[Unsupported] = {"prompt": (), "chat_template": (), "mm_processor_kwargs": ({},)}
    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant's message begins, which is the default."""
    continue_final_message: bool | None = None
    """End the prompt inside the last message."""
    add_special_tokens: bool | None = None
    """Add special tokens besides those that the template writes; not the default."""
    return_token_strs: bool | None = None

    def as_chat(self, model: str) -> ChatRequest:
        """Build the chat request that has this prompt.

        Raises:
            ApiError: no chat request has it.
        """
        same = {name: getattr(self, name) for name in type(self).model_fields.keys() & ChatRequest.model_fields.keys()}
        try:
            return ChatRequest.model_validate(same | {"model": model})
        except ValidationError as error:
            raise from_validation(error) from error


def _which(body: Any) -> str:
    return "<messages>" if isinstance(body, dict) and body.get("messages") is not None else "<prompt>"


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizePrompt, Tag("<prompt>")] | Annotated[TokenizeMessages, Tag("<messages>")],
            Discriminator(_which),
        ]
    ]
):
    """A text, or a conversation."""


class DetokenizeRequest(StrictModel):
    """Token ids, including special ones."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
