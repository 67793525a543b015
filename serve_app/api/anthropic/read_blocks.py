"""Defines the blocks of an Anthropic request that have no counterpart in a chat, and that a model reads as text:
documents, search results, and the calls and results of tools that another server ran.
Never shows a block without text: it is a hint if it is empty, and refused if it has other contents."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.anthropic.blocks import MarkedBlock, TextOrBlocks, Texts, joined
from serve_app.api.anthropic.hinted import ignore_hint_in_schema
from serve_app.api.anthropic.readable import Unreadable, call_text, readable, tagged
from serve_app.api.requests.strict_model import UNSUPPORTED, StrictModel, Unsupported
from serve_app.api.requests.unions import by_type, of_types

_NO_CITATIONS: Unsupported = {"citations": ({"enabled": False},)}
"""Answers have no citations."""


class TextSource(StrictModel):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(StrictModel):
    type: Literal["content"]
    content: TextOrBlocks


_SOURCES = ("text", "content")
DocumentSource = Annotated[
    Annotated[TextSource, Tag("<text>")] | Annotated[ContentSource, Tag("<content>")],
    by_type(_SOURCES, "a source of type text or content; others are not supported"),
    of_types(*_SOURCES),
]


class DocumentBlock(MarkedBlock):
    """A document that has text."""

    unsupported: ClassVar[Unsupported] = _NO_CITATIONS
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def as_text(self) -> str:
        source = self.source
        text = source.data if isinstance(source, TextSource) else joined(source.content)
        return tagged(self.type, "\n".join(part for part in (self.title, self.context, text) if part))


class SearchResultBlock(MarkedBlock):
    unsupported: ClassVar[Unsupported] = _NO_CITATIONS
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts

    @property
    def as_text(self) -> str:
        return tagged(self.type, "\n".join(part for part in (self.title, self.source, joined(self.content)) if part))


class ToolReferenceBlock(MarkedBlock):
    """A tool that a search found. It adds only its name: the model knows all tools already."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def as_text(self) -> str:
        return tagged(self.type, self.tool_name)


class ServerToolUseBlock(MarkedBlock):
    """A call of a tool that another server ran."""

    hints: ClassVar[Unsupported] = {"caller": ({"type": "direct"},)}
    type: Literal["server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    server_name: str | None = None

    @property
    def as_text(self) -> str:
        return tagged(self.type, call_text(self.name, self.input))


def _is_readable(content: Any) -> Any:
    try:
        readable(content)
    except Unreadable as error:
        raise PydanticCustomError(UNSUPPORTED, "{text}", {"text": str(error), "code": UNSUPPORTED}) from error
    return content


RESULTS = (
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
)


class ServerToolResultBlock(MarkedBlock):
    """The result of such a call, reduced to its text."""

    hints: ClassVar[Unsupported] = {"caller": ({"type": "direct"},)}
    type: Literal[RESULTS]  # type: ignore[valid-type]  # the discriminator uses the names, too
    tool_use_id: str
    content: Annotated[Any, AfterValidator(_is_readable)] = Field(default="")
    is_error: bool | None = None

    @property
    def as_text(self) -> str:
        return tagged(self.type, f"{'Error: ' if self.is_error else ''}{readable(self.content)}")


class CompactionBlock(MarkedBlock):
    """A summary of the conversation so far; null if there is none."""

    hints: ClassVar[Unsupported] = dict.fromkeys(("encrypted_content", "signature", "tool_changes"), ())
    type: Literal["compaction"]
    content: str | None = None

    @property
    def as_text(self) -> str:
        return tagged(self.type, self.content) if self.content else ""


Silent = Literal["redacted_thinking", "fallback"]


class SilentBlock(MarkedBlock):
    """A block that adds nothing to the prompt: thoughts that only another server can decrypt, or a fallback's note."""

    is_hint: ClassVar[bool] = True
    type: Silent
    data: str | None = None
    from_: Any = Field(None, alias="from")
    to: Any = None
    trigger: Any = None

    @model_validator(mode="after")
    def _is_a_hint(self) -> SilentBlock:
        ignore_hint_in_schema(f"messages.{self.type}", f"a block of the type {self.type} is not supported", "type")
        return self

    @property
    def as_text(self) -> str:
        return ""


ReadBlock = (
    DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | ServerToolUseBlock
    | ServerToolResultBlock
    | CompactionBlock
    | SilentBlock
)
"""Each gives its text with `as_text`; an empty text adds nothing."""
