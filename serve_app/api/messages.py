"""Owns the messages and tools of a chat request, and what a chat template is shown of them.
Never renders: a template decides what a role or a call looks like."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.content_parts import Content, ImagePart, num_chars, shown
from serve_app.api.strict_model import StrictModel, Unsupported

MAX_TOOLS = 128
_NEVER: tuple[Any, ...] = ()
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


def _read_arguments(text: str) -> Any:
    """As the body itself is read: lone surrogates, endless numbers and deep nesting are a ValueError."""
    return pydantic_core.from_json(text.encode() or b"{}")


def _written_object(text: str) -> str:
    try:
        is_object = isinstance(_read_arguments(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise PydanticCustomError("arguments", "{text}", {"text": "should be a JSON object, written as a string"})
    return text


JsonObject = Annotated[str, AfterValidator(_written_object)]
"""As text; empty is `{}`."""


class FunctionCall(StrictModel):
    name: str
    arguments: JsonObject
    """A JSON object as text."""


class MessageToolCall(StrictModel):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Of a stream's delta, which clients put together and send back."""

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object: templates write it as JSON in their own way."""
        arguments = _read_arguments(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(StrictModel):
    unsupported: ClassVar[Unsupported] = {"annotations": ([],)} | dict.fromkeys(
        ("function_call", "refusal", "audio"), _NEVER
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What an assistant's message thought; servers give it either name."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            text = "should be a string or a list of parts, but for an assistant's message with tool_calls"
            raise PydanticCustomError("missing", "{text}", {"text": text, "field": "content"})
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                text = f"only allowed in an assistant's message, but the role is {self.role}"
                raise PydanticCustomError("role", "{text}", {"text": text, "field": name})
        if self.images and self.role != "user":
            text = f"image parts are only allowed in a user's message, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        return self

    @property
    def images(self) -> list[tuple[int, ImagePart]]:
        """With their places in `content`."""
        parts = self.content if isinstance(self.content, list) else ()
        return [(place, part) for place, part in enumerate(parts) if isinstance(part, ImagePart)]

    @property
    def num_chars(self) -> int:
        """Of its texts and its calls' arguments, and one for each part and call at least."""
        calls = sum(1 + len(call.function.arguments) for call in self.tool_calls or ())
        thoughts = len(self.reasoning_content or self.reasoning or "")
        return num_chars(self.content) + calls + thoughts

    def for_template(self) -> dict[str, Any]:
        told = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        also = {key: value for key, value in told.items() if value is not None}
        return {"role": self.role, "content": shown(self.content)} | also


class FunctionDefinition(StrictModel):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Arguments are what the schema allows, wherever the model calls this function."""


class ToolDefinition(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """`strict` is not for the model."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)]
