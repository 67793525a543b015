"""Defines the messages of an Anthropic request, and which blocks are allowed in which role's messages.
Never translates them; `turns` does. Errors name a block's type in its path, as in Anthropic's API: Claude Code searches
them for the image or document to leave out."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.anthropic.blocks import ImageBlock, MarkedBlock, TextBlock, ThinkingBlock, ToolUseBlock
from serve_app.api.anthropic.read_blocks import (
    RESULTS,
    CompactionBlock,
    DocumentBlock,
    ReadBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    SilentBlock,
    ToolReferenceBlock,
)
from serve_app.api.requests.effort import Effort
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE, StrictModel, Unsupported
from serve_app.api.requests.unions import bare_kind_of, by_type, of_types, text_or_list_of

_IN_RESULTS = ("text", "image", "document", "search_result", "tool_reference")
ResultPart = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")],
    by_type(_IN_RESULTS, f"a block of type {', '.join(_IN_RESULTS)}", tag=bare_kind_of),
    of_types(*_IN_RESULTS),
]
ResultParts = Annotated[list[ResultPart], Field(fail_fast=True)]
ResultContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[ResultParts, Tag("<list>")],
    text_or_list_of("a string or a list of blocks"),
]


class ToolResultBlock(MarkedBlock):
    hints: ClassVar[Unsupported] = {"toolset_name": ()}
    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    """Images follow it in the user's message, because no template shows images in a result."""
    is_error: bool | None = None
    """If true, the model reads `Error: ` before the content."""


_CLASSES = {
    "server_tool_use": "<server_use>",
    "mcp_tool_use": "<server_use>",
    **dict.fromkeys(RESULTS, "<server_result>"),
    "redacted_thinking": "<silent>",
    "fallback": "<silent>",
}
"""The tags of blocks that share a class with others."""
_KINDS = (
    *("text", "image", "document", "search_result", "thinking", "tool_use", "tool_result", "compaction"),
    *_CLASSES,
)
_ONLY_IN = {
    **dict.fromkeys(("image", "document", "search_result", "tool_result"), "user"),
    **dict.fromkeys(("thinking", "tool_use", *_CLASSES), "assistant"),
}


def _class_of(value: object) -> str | None:
    kind = bare_kind_of(value, _KINDS)
    return None if kind is None else _CLASSES.get(kind, kind)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ServerToolUseBlock, Tag("<server_use>")]
    | Annotated[ServerToolResultBlock, Tag("<server_result>")]
    | Annotated[SilentBlock, Tag("<silent>")],
    Discriminator(
        _class_of, custom_error_type="type", custom_error_message=f"should be a block of type {', '.join(_KINDS)}"
    ),
    of_types(*_KINDS),
]
Blocks = Annotated[list[Block], Field(fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Blocks, Tag("<list>")], text_or_list_of("a string or a list of blocks")
]
AnyBlock = TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ReadBlock


class MessageOutputConfig(StrictModel):
    effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """Like the request's, which it overrides. That of the last message with one applies."""


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    """A system message has only text, and may stand anywhere."""
    content: Content
    """A message without content says nothing."""
    output_config: MessageOutputConfig | None = None
    """Only in a system message."""

    @model_validator(mode="after")
    def _only_the_system_configures(self) -> AnthropicMessage:
        if self.output_config is not None and self.role != "system":
            text = f"only allowed in a message of the system, but the role is {self.role}"
            raise PydanticCustomError("role", "{text}", {"text": text, "field": "output_config"})
        return self

    @model_validator(mode="after")
    def _blocks_are_in_their_place(self) -> AnthropicMessage:
        for block in self.blocks:
            if _ONLY_IN.get(block.type, self.role) != self.role:
                text = f"a block of type {block.type} is only allowed in a message of the {_ONLY_IN[block.type]}"
                raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
            if self.role == "system" and not isinstance(block, TextBlock):
                text = f"a block of type {block.type} is not allowed in a message of the system, which has only text"
                raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        return self

    @property
    def blocks(self) -> list[AnyBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)
