"""Owns the parts of which a message's content is made, and what a chat template is shown of them.
Never reads an image; `serve_app.images` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from serve_app.api.requests.strict_model import StrictModel, Unsupported
from serve_app.api.requests.unions import by_type, of_types, text_or_list_of

_NEVER: tuple[Any, ...] = ()
CACHE_MARK: Unsupported = {"cache_control": _NEVER}
"""Anthropic's mark of a prefix to keep, in chats through OpenRouter and LiteLLM: all prefixes are kept here."""


Detail = Literal["auto", "low", "high", "original"]
"""How well an image is to be seen: all but `low` as well as the model and the limits allow."""


class TextPart(StrictModel):
    unsupported: ClassVar[Unsupported] = dict.fromkeys(
        ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal"), _NEVER
    )
    hints: ClassVar[Unsupported] = CACHE_MARK
    hint_path: ClassVar[str] = "messages.content."
    type: Literal["text"]
    text: str


class ImageUrl(StrictModel):
    url: str = Field(min_length=1)
    """`data:image/png;base64,...`, or an http or https URL of a host that the server's settings list."""
    detail: Detail | None = None
    """`low`: scaled to at most 512 x 512 pixels; otherwise to what the model and the server take."""


class ImagePart(StrictModel):
    """An image, for models that take any, in a message of the user."""

    unsupported: ClassVar[Unsupported] = dict.fromkeys(("text", "uuid"), _NEVER)
    hints: ClassVar[Unsupported] = CACHE_MARK
    hint_path: ClassVar[str] = "messages.content."
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    by_type(("text", "image_url"), "a part of type text or image_url"),
    of_types("text", "image_url"),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<list>")], text_or_list_of("a string or a list of parts")
]


def shown(content: str | Sequence[TextPart | ImagePart] | None) -> str | list[dict[str, str]]:
    """Texts become one string, a line each: most templates know no parts. Beside images they are parts."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content or ""
    if any(isinstance(part, ImagePart) for part in content):
        return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else IMAGE for part in content]
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def num_chars(content: str | Sequence[TextPart | ImagePart] | None) -> int:
    """Of its texts, and one for each part at least."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(1 + len(part.text) if isinstance(part, TextPart) else 1 for part in content)


IMAGE = {"type": "image"}
"""As templates of models with images know it; the pixels are not theirs."""
