"""Owns the items that a response goes on from: messages, calls and their outputs, thoughts.
Never translates them; `conversation` does. Ids and states of items are accepted and without effect."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

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


_PARTS = "a string or a list of input_text or output_text parts"
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ItemText], Field(fail_fast=True), Tag("<list>")],
    text_or_list_of(_PARTS),
]


class MessageItem(_Item):
    unsupported: ClassVar[Unsupported] = {"phase": ("final_answer", "commentary")}
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


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
    output: Content


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
