"""Collects the images of a conversation, and places them in its turns and in the prompt's tokens.
Never decodes one: `serve_app.images` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.multimodal_inputs import InputKind, SpanInput
from serve_app.api.http.offload import run_decoder, run_sized
from serve_app.api.requests.content_parts import IMAGE, IMAGE_PLACE, ImageUrl
from serve_app.api.requests.messages import Message
from serve_app.api.requests.strict_model import UNSUPPORTED
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError
from serve_app.images.intake import AskedImage
from serve_app.images.pixels import Pixels


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A prompt's tokens, and the inputs besides text that stand in it."""

    token_ids: list[int]
    inputs: tuple[SpanInput, ...] = ()


async def read_images(messages: Sequence[Message], model: ServedModel) -> list[Pixels]:
    """Read the images of all messages, in order.

    Raises:
        ApiError: the model takes no images, or one of them is refused.
    """
    images = await run_sized(len(messages), lambda: _images(messages))
    asked = [AskedImage(part.url, name, part.detail or "auto") for name, part in images]
    if not asked:
        return []
    if model.images is None:
        text = f"The model {model.id} takes no images: it is served for text alone."
        raise ApiError(400, text, param=asked[0].param, code=UNSUPPORTED)
    return await model.images.read(asked, run_decoder)


def image_names(messages: Sequence[Message], theirs: Sequence[str]) -> dict[str, str]:
    """Map each image's name in the conversation to its name in the request as the client wrote it.
    `theirs`: the client's names, in order."""
    return dict(zip((name for name, _ in _images(messages)), theirs, strict=True))


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as a chat template gets them. Images of results become the user's, after all results that
    follow each other, because no template shows images in a result."""
    shown: list[dict[str, Any]] = []
    seen = 0
    for message in messages:
        if seen and message.role != "tool":
            shown.append(_user_shows(seen))
            seen = 0
        turn = message.for_template()
        if message.role == "tool" and message.images:
            seen += len(message.images)
            turn["content"] = "\n".join(IMAGE_PLACE if part == IMAGE else part["text"] for part in turn["content"])
        shown.append(turn)
    return [*shown, _user_shows(seen)] if seen else shown


def _user_shows(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [IMAGE] * count}


def _images(messages: Sequence[Message]) -> list[tuple[str, ImageUrl]]:
    return [
        (f"messages.{number}.content.{place}.image_url", part.image_url)
        for number, message in enumerate(messages)
        for place, part in message.images
    ]


def place_images(token_ids: Sequence[int], images: Sequence[Pixels], kind: InputKind) -> EncodedChat:
    """Repeat each placeholder token as often as its image has tokens.

    Raises:
        ApiError: the number of placeholders is not the number of images.
    """
    if (num_places := token_ids.count(kind.token_id)) != len(images):
        text = f"The prompt has {num_places} places for the conversation's {len(images)} images"
        too_many, too_few = "a message's text contains the model's image token", "its template shows no images"
        why = too_many if num_places > len(images) else too_few
        raise ApiError(400, f"{text}: {why}.", param="messages", code="invalid_value")
    waiting = iter(images)
    expanded: list[int] = []
    inputs: list[SpanInput] = []
    for token in token_ids:
        count = 1
        if token == kind.token_id:
            grid, data = next(waiting)
            inputs.append(SpanInput.of(kind.name, len(expanded), grid, data))
            count = inputs[-1].num_tokens
        expanded += [token] * count
    return EncodedChat(expanded, tuple(inputs))
