"""Owns the items that a response goes on from: messages, calls and their outputs, thoughts.
Never translates them; `conversation` does. Ids and states of items are accepted and without effect."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.messages import JsonObject
from serve_app.api.strict_model import StrictModel, Unsupported
from serve_app.api.unions import by_type, text_or_list_of


class _Item(StrictModel):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ItemText(StrictModel):
    unsupported: ClassVar[Unsupported] = {"annotations": ([],), "logprobs": ([],), "prompt_cache_breakpoint": ()}
    type: Literal["input_text", "output_text"]
    text: str


class ItemImage(StrictModel):
    """An image, for models that take any, in a message of the user."""

    unsupported: ClassVar[Unsupported] = {"file_id": (), "prompt_cache_breakpoint": ()}
    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    """`data:image/png;base64,...`, or an http or https URL of a host that the server's settings list."""
    detail: Literal["auto", "low", "high"] | None = None


_PART_TYPES = ("input_text", "output_text", "input_image")
Part = Annotated[
    Annotated[ItemText, Tag("<input_text>")]
    | Annotated[ItemText, Tag("<output_text>")]
    | Annotated[ItemImage, Tag("<input_image>")],
    by_type(_PART_TYPES, f"a part of type {', '.join(_PART_TYPES)}; others are not supported"),
]
TextContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ItemText], Field(fail_fast=True), Tag("<list>")],
    text_or_list_of("a string or a list of input_text or output_text parts"),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    text_or_list_of("a string or a list of input_text, output_text or input_image parts"),
]


class MessageItem(_Item):
    unsupported: ClassVar[Unsupported] = {"phase": ("final_answer", "commentary")}
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @model_validator(mode="after")
    def _images_are_the_users(self) -> MessageItem:
        if self.role != "user" and any(isinstance(part, ItemImage) for part in self.content):
            text = f"input_image parts are only allowed in a user's message, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        return self


class CallItem(_Item):
    unsupported: ClassVar[Unsupported] = {"namespace": (), "async": (False,), "caller": ({"type": "direct"},)}
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonObject
    """A JSON object as text."""


class OutputItem(_Item):
    unsupported: ClassVar[Unsupported] = {"caller": ({"type": "direct"},)}
    type: Literal["function_call_output"]
    call_id: str
    output: TextContent


class Thought(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    unsupported: ClassVar[Unsupported] = {"encrypted_content": ()}
    type: Literal["reasoning"]
    summary: Annotated[list[Thought], Field(fail_fast=True)] | None = None
    """Where there is no content, this is what the model reads."""
    content: Annotated[list[Thought], Field(fail_fast=True)] | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    by_type(_KINDS, f"an item of type {', '.join(_KINDS)}; others are not supported", default="message"),
]
