"""Describes the JSON of Anthropic's answers for the OpenAPI document; tests check real answers against it.
Never makes an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from serve_app.api.openai.answer_schema import Shape

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
"""`model_context_window_exceeded`: the context ended the answer, because it held less than `max_tokens`."""


class Text(Shape):
    type: Literal["text"]
    text: str


class Thoughts(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Empty."""


class Caller(Shape):
    type: Literal["direct"]


class ToolUse(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller


AnswerBlock = Annotated[Text | Thoughts | ToolUse, Field(discriminator="type")]


class MessageUsage(Shape):
    input_tokens: int
    """The prompt's tokens without the cached ones."""
    cache_creation_input_tokens: Literal[0]
    cache_creation: None
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: None
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None
    speed: Literal["standard"]
    iterations: None
    fallback_credit: None


class MessageAnswer(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    container: None
    context_management: None
    """Always null: no edit is ever applied."""
    diagnostics: None
    stop_details: None
    stop_reason: StopReason | None
    """Null at the beginning of a stream."""
    stop_sequence: str | None
    """The stop sequence that ended the answer, if one did. Null after a call, because the reason is then `tool_use`."""
    usage: MessageUsage


class MessageStart(Shape):
    type: Literal["message_start"]
    message: MessageAnswer


class Ping(Shape):
    type: Literal["ping"]


class BlockStart(Shape):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextDelta(Shape):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Shape):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Shape):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(Shape):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Shape):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")]


class BlockStop(Shape):
    type: Literal["content_block_stop"]
    index: int


class Stopped(Shape):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None
    container: None


class MessageDelta(Shape):
    type: Literal["message_delta"]
    delta: Stopped
    usage: MessageUsage
    context_management: None


class MessageStop(Shape):
    type: Literal["message_stop"]


class ErrorDetails(Shape):
    type: str
    message: str
    """Names the field at fault."""


class ErrorAnswer(Shape):
    type: Literal["error"]
    error: ErrorDetails
    request_id: str | None


class Event(
    RootModel[
        Annotated[
            MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | ErrorAnswer,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a stream. An error is always the last one."""


class TokenCount(Shape):
    input_tokens: int
