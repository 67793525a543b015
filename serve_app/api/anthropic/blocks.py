"""Owns the blocks and messages of an Anthropic request.
Never translates them; `conversation` does."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.strict_model import StrictModel, Unsupported
from serve_app.api.unions import by_type, text_or_list_of


class CacheControl(StrictModel):
    """A hint, which changes no answer: every prefix is cached while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(StrictModel):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    unsupported: ClassVar[Unsupported] = {"citations": ([],)}
    type: Literal["text"]
    text: str


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(StrictModel):
    type: Literal["url"]
    url: str = Field(min_length=1)
    """http or https, of a host that the server's settings list."""


Source = Annotated[
    Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
    by_type(("base64", "url"), "a source of type base64 or url; others are not supported"),
]


class ImageBlock(_Block):
    """An image, for models that take any, in a message of the user."""

    type: Literal["image"]
    source: Source


class ThinkingBlock(StrictModel):
    """What the assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Not checked: this server's are empty."""


class ToolUseBlock(_Block):
    unsupported: ClassVar[Unsupported] = {"caller": ({"type": "direct"},)}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = Annotated[list[TextBlock], Field(fail_fast=True)]
TextOrBlocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
    text_or_list_of("a string or a list of text blocks"),
]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks | None = None
    is_error: bool | None = None
    """The model reads `Error: ` before the content."""


_BLOCKS = ("text", "image", "thinking", "tool_use", "tool_result")
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type(_BLOCKS, "a block of type text, image, thinking, tool_use or tool_result; others are not supported"),
]
Blocks = Annotated[list[Block], Field(min_length=1, fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Blocks, Tag("<list>")], text_or_list_of("a string or a list of blocks")
]
_ONLY_IN = {"image": "user", "thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    """A turn of the system's has text alone; where it may stand is the model's template's to say."""
    content: Content

    @model_validator(mode="after")
    def _blocks_are_in_their_place(self) -> AnthropicMessage:
        for block in self.blocks:
            if _ONLY_IN.get(block.type, self.role) != self.role:
                text = f"a block of type {block.type} is only allowed in a message of the {_ONLY_IN[block.type]}"
                raise PydanticCustomError("role", "{text}", {"text": text, "field": "content"})
        return self

    @property
    def blocks(self) -> list[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
