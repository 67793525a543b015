"""Defines the messages and tools of a chat request, and what a chat template gets of them.
Never renders: a template decides what a role or a call looks like."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.content_parts import (
    CACHE_MARK,
    MESSAGE_HINTS,
    MESSAGE_UNSUPPORTED,
    OF_LITELLM,
    Content,
    ImagePart,
    RefusalPart,
    TextPart,
    num_chars,
    shown,
)
from serve_app.api.requests.hints import hints
from serve_app.api.requests.strict_model import UNSUPPORTED, StrictModel, Unsupported
from serve_app.api.requests.unions import of_types
from serve_app.grammars.lark_rules import Lark
from serve_app.parsing.call_arguments import read_arguments

MAX_TOOLS = 1024
"""The most tools of a request: agents with several MCP servers offer hundreds."""
_NEVER: tuple[Any, ...] = ()
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
"""The length limit is that of Anthropic's API and of MCP; OpenAI's is half of it."""


class FunctionCall(StrictModel):
    hints: ClassVar[Unsupported] = OF_LITELLM
    hint_path: ClassVar[str] = "messages.tool_calls.function."
    name: str
    arguments: str
    """A JSON object as text. Any other text is shown to the model unchanged."""
    parsed_arguments: Any = None
    """The client's own reading of `arguments`, from `parse()` of OpenAI's SDK. It is not read."""


class MessageToolCall(StrictModel):
    """A call that the assistant made."""

    hints: ClassVar[Unsupported] = {**OF_LITELLM, "extra_content": _NEVER}  # Gemini's signatures of thoughts
    hint_path: ClassVar[str] = "messages.tool_calls."
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """A leftover of a stream's deltas, which clients join and send back."""

    def for_template(self) -> dict[str, Any]:
        """Give the arguments as an object, which templates write as JSON in their own way, or as text if unreadable."""
        text = self.function.arguments
        parsed = read_arguments(text)
        arguments = text if parsed is None else parsed
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(StrictModel):
    unsupported: ClassVar[Unsupported] = MESSAGE_UNSUPPORTED
    hints: ClassVar[Unsupported] = MESSAGE_HINTS
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
    """The thoughts of an assistant's message; servers use either name."""
    refusal: str | None = None
    """Words of the assistant, from a server that tells refusals apart. The model reads them after the content."""
    annotations: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Notes about an answer's text, which clients send back with it. They are not read: the model did not write
    them."""
    parsed: Any = None
    """The client's own reading of `content`, from `parse()` of OpenAI's SDK. It is not read."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            text = "should be a string or a list of parts, except in an assistant's message or a tool's"
            raise PydanticCustomError("missing", "{text}", {"text": text, "field": "content"})
        for name in ("tool_calls", "reasoning", "reasoning_content", "refusal", "annotations", "parsed"):
            if getattr(self, name) and self.role != "assistant":
                text = f"only allowed in an assistant's message, but the role is {self.role}"
                raise PydanticCustomError("role", "{text}", {"text": text, "field": name})
        if self.role != "assistant" and any(isinstance(part, RefusalPart) for part in self.content or ()):
            text = f"refusal parts are only allowed in an assistant's message, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        parts = self.content if isinstance(self.content, list) else []
        for place, part in enumerate(parts if self.role != "assistant" else ()):
            if isinstance(part, TextPart) and part.copied is not None:
                text = f"only allowed in an assistant's message, but the role is {self.role}"
                raise PydanticCustomError("role", "{text}", {"text": text, "field": f"content.{place}.{part.copied}"})
        if self.images and self.role not in ("user", "tool"):
            text = f"image parts are only allowed in a user's message or a tool's, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        return self

    @model_validator(mode="after")
    def _copies_have_an_original(self) -> Message:
        thoughts = self.reasoning_content or self.reasoning
        own = {"reasoning": thoughts, "reasoning_content": thoughts, "tool_calls": self.tool_calls}
        for place, part in enumerate(self.content if isinstance(self.content, list) else ()):
            lost = [name for name in own if isinstance(part, TextPart) and getattr(part, name) and not own[name]]
            for name in lost:
                if hints().strict:
                    told = {"field": f"content.{place}.{name}", "code": UNSUPPORTED}
                    text = f"only read in the message, as messages.{name}: here it has no effect"
                    raise PydanticCustomError(UNSUPPORTED, "{text}", {"text": text, **told})
                hints().ignore(f"messages.content.{name}")
        return self

    @property
    def images(self) -> list[tuple[int, ImagePart]]:
        """The image parts with their places in `content`."""
        parts = self.content if isinstance(self.content, list) else ()
        return [(place, part) for place, part in enumerate(parts) if isinstance(part, ImagePart)]

    @property
    def num_chars(self) -> int:
        """The characters of its texts and its calls' arguments, and at least one for each part and call."""
        calls = sum(1 + len(call.function.arguments) for call in self.tool_calls or ())
        thoughts = len(self.reasoning_content or self.reasoning or "")
        return num_chars(self.content) + len(self.refusal or "") + calls + thoughts

    def for_template(self) -> dict[str, Any]:
        optional = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        present = {key: value for key, value in optional.items() if value is not None}
        content = shown(self.content)
        if self.refusal:
            content = f"{content}\n{self.refusal}" if content else self.refusal
        return {"role": self.role, "content": content} | present


class FunctionDefinition(StrictModel):
    hints: ClassVar[Unsupported] = CACHE_MARK
    hint_path: ClassVar[str] = "tools.function."
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """If true, the arguments of every call of this function follow its schema."""

    @property
    def kept_schema(self) -> dict[str, Any] | None:
        """The schema that constrained arguments follow. It may have more constraints than the model gets to see."""
        return self.parameters

    @property
    def kept_text(self) -> Lark | None:
        """The grammar of a single argument that no schema can describe."""
        return None


class ToolDefinition(StrictModel):
    hints: ClassVar[Unsupported] = CACHE_MARK
    hint_path: ClassVar[str] = "tools."
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Leave out `strict`, which is not meant for the model."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


Tools = Annotated[list[Annotated[ToolDefinition, of_types("function")]], Field(max_length=MAX_TOOLS, fail_fast=True)]
