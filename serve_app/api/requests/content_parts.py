"""Defines the parts of a message's content, and what a chat template gets of them.
Never reads an image; `serve_app.images` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from serve_app.api.requests.strict_model import USED_IF_POSSIBLE, StrictModel, Unsupported
from serve_app.api.requests.unions import by_type, of_types, text_or_list_of

_NEVER: tuple[Any, ...] = ()
CACHE_MARK: Unsupported = {"cache_control": _NEVER}
"""Anthropic's mark of a prefix to cache, as OpenRouter and LiteLLM pass it on. All prefixes are cached here anyway."""
BREAKPOINT: Unsupported = {"prompt_cache_breakpoint": _NEVER}
"""OpenAI's mark of the same."""
_MARKS: Unsupported = {**CACHE_MARK, **BREAKPOINT}

OF_LITELLM: Unsupported = {"provider_specific_fields": _NEVER}
"""LiteLLM adds it to answers and their calls, with what only the provider that answered can read."""
# VS Code's Copilot keeps them on messages: a prefix's mark, what a turn refers to, and thoughts in another API's form.
_COPILOT: Unsupported = {
    "copilot_cache_control": _NEVER,
    **dict.fromkeys(("copilot_references", "copilot_confirmations"), ([],)),
    **dict.fromkeys(("cot_id", "cot_summary"), _NEVER),
}
MESSAGE_UNSUPPORTED: Unsupported = {
    **dict.fromkeys(("function_call", "audio"), _NEVER),
    "images": ([],),  # drawn by another provider's model: without them, this one would not know what is spoken of
}
"""What a message cannot have, nor a text part that repeats one."""
MESSAGE_HINTS: Unsupported = {
    **CACHE_MARK,
    **OF_LITELLM,
    # OpenRouter's and LiteLLM's: thoughts of other providers' models, some of them encrypted. Plain ones also come
    # as `reasoning_content`.
    **dict.fromkeys(("reasoning_details", "thinking_blocks", "reasoning_items"), ([],)),
    **_COPILOT,
}
"""The hints of a message, and of a text part that repeats one."""

Detail = Literal["auto", "low", "high", "original"]
"""The resolution of an image. All values but `low` mean as much as the model and the limits allow."""

COPIED = ("role", "annotations", "reasoning", "reasoning_content", "tool_calls", "parsed")


class TextPart(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        **dict.fromkeys(("image_url", "input_audio", "file", "video_url", "audio_url"), _NEVER),
        **MESSAGE_UNSUPPORTED,
        **dict.fromkeys(("name", "tool_call_id"), _NEVER),
        "refusal": ("",),
    }
    hints: ClassVar[Unsupported] = {**MESSAGE_HINTS, **BREAKPOINT}
    hint_path: ClassVar[str] = "messages.content."
    type: Literal["text"]
    text: str
    id: str | None = None
    """LangChain's name of the part. It is not read."""
    index: int | str | None = None
    """A leftover of a stream's blocks, which LangChain sends back."""
    # OpenAI's agents for JavaScript copy the rest of an answer into its text. The message has them, too.
    role: Literal["assistant"] | None = None
    annotations: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    parsed: Any = None
    """A copy of the message's field of this name, as are the two above. Not read."""
    reasoning: Annotated[str | None, USED_IF_POSSIBLE] = None
    reasoning_content: Annotated[str | None, USED_IF_POSSIBLE] = None
    tool_calls: Annotated[list[dict[str, Any]] | None, Field(fail_fast=True), USED_IF_POSSIBLE] = None
    """The same, as are the two above. Without effect if the message has no such field of its own."""

    @property
    def copied(self) -> str | None:
        """The name of a field of an answer's message that the part repeats. An empty one says nothing."""
        return next((name for name in COPIED if getattr(self, name)), None)


class RefusalPart(StrictModel):
    """Words of the assistant, from a server that tells refusals apart. The model reads them as its text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(StrictModel):
    # Copilot's and Strands' names of the image's type; the image itself tells it.
    hints: ClassVar[Unsupported] = dict.fromkeys(("media_type", "format"), _NEVER)
    hint_path: ClassVar[str] = "messages.content.image_url."
    url: str = Field(min_length=1)
    """`data:image/png;base64,...`, or an http or https URL of a host that the server's settings list."""
    detail: Detail | None = None
    """With `low` the image is scaled to at most 512 x 512 pixels, otherwise to the limits of model and server."""


class ImagePart(StrictModel):
    """An image in a user's message or a tool's, for models that take images."""

    unsupported: ClassVar[Unsupported] = dict.fromkeys(("text", "uuid"), _NEVER)
    hints: ClassVar[Unsupported] = _MARKS
    hint_path: ClassVar[str] = "messages.content."
    type: Literal["image_url"]
    image_url: ImageUrl


_KINDS = ("text", "image_url", "refusal")
AnyPart = TextPart | RefusalPart | ImagePart
Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    by_type(_KINDS, f"a part of type {', '.join(_KINDS)}"),
    of_types(*_KINDS),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<list>")], text_or_list_of("a string or a list of parts")
]


def shown(content: str | Sequence[AnyPart] | None) -> str | list[dict[str, str]]:
    """Join texts to one string, a line each, because most templates know no parts. Beside images they stay parts."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content or ""
    if any(isinstance(part, ImagePart) for part in content):
        return [IMAGE if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in content]
    return "\n".join(part.text for part in content if not isinstance(part, ImagePart))


def num_chars(content: str | Sequence[AnyPart] | None) -> int:
    """Count the characters of the texts, and at least one for each part."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(1 if isinstance(part, ImagePart) else 1 + len(part.text) for part in content)


IMAGE = {"type": "image"}
"""An image part in the form that templates of models with images know; they never get the pixels."""
IMAGE_PLACE = "[image]"
"""Stands for an image in a tool's result, which is otherwise text: the image follows all results."""
