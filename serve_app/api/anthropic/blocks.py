"""Defines the blocks of an Anthropic request that a chat has in another form: texts, images, thoughts and calls.
Never translates them; `turns` does."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from serve_app.api.anthropic.hinted import hint_where_refused
from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.unions import by_type, of_types, text_or_list_of


class CacheControl(StrictModel):
    """A hint that changes no answer: every prefix is cached as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


CacheMark = Annotated[CacheControl, hint_where_refused("cache_control")]


class MarkedBlock(StrictModel):
    hint_path: ClassVar[str] = "messages."
    cache_control: CacheMark | None = None


class TextBlock(MarkedBlock):
    hints: ClassVar[Unsupported] = {"citations": ([],)}
    type: Literal["text"]
    text: str


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(StrictModel):
    type: Literal["url"]
    url: str = Field(min_length=1)
    """An http or https URL of a host that the server's settings list."""


Source = Annotated[
    Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
    by_type(("base64", "url"), "a source of type base64 or url"),
    of_types("base64", "url"),
]


class ImageBlock(MarkedBlock):
    """An image in a user message, for models that take images."""

    unsupported: ClassVar[Unsupported] = {
        "transformations": ({}, {"oversized_image": "downsize"})  # a large image is always scaled down
    }
    type: Literal["image"]
    source: Source


class ThinkingBlock(MarkedBlock):
    """Thoughts of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """The thoughts, sealed, if `thinking` is empty; otherwise not checked."""


class ToolUseBlock(MarkedBlock):
    hints: ClassVar[Unsupported] = {"caller": ({"type": "direct"},), "toolset_name": ()}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = Annotated[list[TextBlock], Field(fail_fast=True)]
TextOrBlocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")],
    text_or_list_of("a string or a list of text blocks"),
]


def joined(content: str | list[TextBlock]) -> str:
    """Join the texts, one per line; empty ones add no line."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content if block.text)
