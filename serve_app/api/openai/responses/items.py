"""Owns the items that a response continues: messages, calls and their outputs, thoughts, and tools that come late.
Never translates them; `turns` does. States of items are accepted and have no effect."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.openai.responses.replays import (
    REPLAYED,
    UNREAD,
    CodeCall,
    LocalShellCall,
    LocalShellOutput,
    McpCall,
    PatchCall,
    PatchOutput,
    ShellCall,
    ShellOutput,
    UnreadItem,
    only,
)
from serve_app.api.openai.responses.tools import Tool
from serve_app.api.requests.content_parts import BREAKPOINT, Detail
from serve_app.api.requests.messages import MAX_TOOLS
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.unions import by_type, kind_of, of_types, text_or_list_of


class _Item(StrictModel):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ItemText(StrictModel):
    hints: ClassVar[Unsupported] = BREAKPOINT
    hint_path: ClassVar[str] = "input.content."
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """What an answer said about its text, sent back with it. Not read: the text is all that the model wrote."""
    logprobs: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """As `annotations`."""
    parsed: Any = None
    """The client's own reading of the text, from `parse()` of OpenAI's SDK. Not read."""


class ItemImage(StrictModel):
    """An image in a user's message or a tool's output, for models that take images."""

    unsupported: ClassVar[Unsupported] = {"file_id": ()}
    hints: ClassVar[Unsupported] = BREAKPOINT
    hint_path: ClassVar[str] = "input.content."
    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    """`data:image/png;base64,...`, or an http or https URL on a host that the server's settings list."""
    detail: Detail | None = None


class ItemRefusal(StrictModel):
    """Words of the assistant, from a server that tells refusals apart. The model reads them as its text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ItemPart = ItemText | ItemImage | ItemRefusal
_PART_TYPES = ("input_text", "output_text", "input_image")
Part = Annotated[
    Annotated[ItemText, Tag("<input_text>")]
    | Annotated[ItemText, Tag("<output_text>")]
    | Annotated[ItemImage, Tag("<input_image>")],
    by_type(_PART_TYPES, f"a part of type {', '.join(_PART_TYPES)}"),
    of_types(*_PART_TYPES),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    text_or_list_of("a string or a list of input_text, output_text or input_image parts"),
]

_SPOKEN_TYPES = (*_PART_TYPES, "refusal")
_Spoken = Annotated[
    Annotated[ItemText, Tag("<input_text>")]
    | Annotated[ItemText, Tag("<output_text>")]
    | Annotated[ItemImage, Tag("<input_image>")]
    | Annotated[ItemRefusal, Tag("<refusal>")],
    by_type(_SPOKEN_TYPES, f"a part of type {', '.join(_SPOKEN_TYPES)}"),
    of_types(*_SPOKEN_TYPES),
]


class MessageItem(_Item):
    unsupported: ClassVar[Unsupported] = {"phase": ("final_answer", "commentary")}
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[_Spoken], Field(fail_fast=True), Tag("<list>")],
        text_or_list_of("a string or a list of input_text, output_text, input_image or refusal parts"),
    ]

    @model_validator(mode="after")
    def _parts_are_in_their_place(self) -> MessageItem:
        if self.role != "user" and any(isinstance(part, ItemImage) for part in self.content):
            text = f"input_image parts are only allowed in a user's message, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        if self.role != "assistant" and any(isinstance(part, ItemRefusal) for part in self.content):
            text = f"refusal parts are only allowed in an assistant's message, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        return self


_OF_CALLS: Unsupported = {
    "caller": ({"type": "direct"},),  # the model made the call, not a program
    **dict.fromkeys(("async", "async_"), (False,)),  # dumps of the SDK's models have its own name of it
}


class CallItem(_Item):
    unsupported: ClassVar[Unsupported] = _OF_CALLS
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    """A JSON object as text. Anything else is shown to the model as plain text."""
    parsed_arguments: Any = None
    """The client's own reading of the arguments, from `parse()` of OpenAI's SDK. Not read."""


class OutputItem(_Item):
    unsupported: ClassVar[Unsupported] = {"caller": _OF_CALLS["caller"]}
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    """Its images are shown to the model as the user's."""
    # The output's call has them.
    name: str | None = None
    namespace: str | None = None


class CustomCallItem(_Item):
    unsupported: ClassVar[Unsupported] = _OF_CALLS
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CustomOutputItem(OutputItem):
    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


Output = OutputItem | LocalShellOutput | ShellOutput | PatchOutput
"""What a tool of the client answered."""


class Thought(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[Thought], Field(fail_fast=True)] | None = None
    """What the model reads if there is nothing else."""
    content: Annotated[list[Thought], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None
    """Read if there is no content and this server sealed it."""


class AdditionalToolsItem(_Item):
    """Tools of the request besides those in `tools`, which win over tools of the same name here. The last item with a
    tool wins over earlier ones."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ReferenceItem(StrictModel):
    """An item of the same request, or of a kept response's output. It is repeated here, at most once per request."""

    type: Literal["item_reference"]
    id: str


_MODELS = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
_KINDS = (*_MODELS, "reasoning", "additional_tools", "item_reference", *REPLAYED)


def _kind(value: Any) -> str | None:
    return "<unread>" if kind_of(value, UNREAD) else kind_of(value, _KINDS, default="message")


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")]
    | Annotated[LocalShellCall, only(LocalShellCall), Tag("<local_shell_call>")]
    | Annotated[LocalShellOutput, only(LocalShellOutput), Tag("<local_shell_call_output>")]
    | Annotated[ShellCall, only(ShellCall), Tag("<shell_call>")]
    | Annotated[ShellOutput, only(ShellOutput), Tag("<shell_call_output>")]
    | Annotated[PatchCall, only(PatchCall), Tag("<apply_patch_call>")]
    | Annotated[PatchOutput, only(PatchOutput), Tag("<apply_patch_call_output>")]
    | Annotated[McpCall, only(McpCall), Tag("<mcp_call>")]
    | Annotated[CodeCall, only(CodeCall), Tag("<code_interpreter_call>")]
    | Annotated[UnreadItem, only(UnreadItem), Tag("<unread>")],
    Discriminator(_kind, custom_error_type="type", custom_error_message="should be an item of a known type"),
    of_types(*_KINDS, is_hint=UNREAD.__contains__),
]
