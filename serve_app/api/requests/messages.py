"""Owns the messages and tools of a chat request, and what a chat template is shown of them.
Never renders: a template decides what a role or a call looks like."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.content_parts import CACHE_MARK, Content, ImagePart, num_chars, shown
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.unions import of_types
from serve_app.grammars.lark_rules import Lark
from serve_app.parsing.call_arguments import read_arguments

MAX_TOOLS = 1024
"""Of a request: agents with several servers of MCP offer hundreds."""
_NEVER: tuple[Any, ...] = ()
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
"""As long as in Anthropic's API and in MCP; in OpenAI's, half of it."""


class FunctionCall(StrictModel):
    name: str
    arguments: str
    """A JSON object as text; what is none is shown to the model as the text that it is."""


class MessageToolCall(StrictModel):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Of a stream's delta, which clients put together and send back."""

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object: templates write it as JSON in their own way. As text where they are none."""
        given = self.function.arguments
        found = read_arguments(given)
        arguments = given if found is None else found
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


AssistantCall = Annotated[MessageToolCall, of_types("function")]


class Message(StrictModel):
    unsupported: ClassVar[Unsupported] = dict.fromkeys(("function_call", "refusal", "audio"), _NEVER)
    hints: ClassVar[Unsupported] = {**CACHE_MARK, "provider_specific_fields": _NEVER}  # litellm's, of its own answers
    hint_path: ClassVar[str] = "messages."
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: (
        Annotated[list[Annotated[MessageToolCall, of_types("function")]], Field(max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What an assistant's message thought; servers give it either name."""
    annotations: list[dict[str, Any]] | None = None
    """What an answer said about its text comes back with it, and is not read: the text is all that the model wrote."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            text = "should be a string or a list of parts, but for an assistant's message or a tool's"
            raise PydanticCustomError("missing", "{text}", {"text": text, "field": "content"})
        for name in ("tool_calls", "reasoning", "reasoning_content", "annotations"):
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
    hints: ClassVar[Unsupported] = CACHE_MARK
    hint_path: ClassVar[str] = "tools.function."
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Arguments are what the schema allows, wherever the model calls this function."""

    @property
    def kept_schema(self) -> dict[str, Any] | None:
        """What constrained arguments keep to, which may say more than the model is told."""
        return self.parameters

    @property
    def kept_text(self) -> Lark | None:
        """The grammar of the one argument, where no schema can say it."""
        return None


class ToolDefinition(StrictModel):
    hints: ClassVar[Unsupported] = CACHE_MARK
    hint_path: ClassVar[str] = "tools."
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """`strict` is not for the model."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


Tools = Annotated[list[Annotated[ToolDefinition, of_types("function")]], Field(max_length=MAX_TOOLS, fail_fast=True)]
