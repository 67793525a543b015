"""Reads a request's images within the limits of the settings.
Never keeps an image, and never blocks the event loop: it only fetches files there, and leaves decoding to who asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.multimodal_inputs import InputKind
from serve_app.errors.api_error import ApiError
from serve_app.images.data_url import SCHEME, read_data_url
from serve_app.images.fetch import Fetcher
from serve_app.images.pixels import LOW_DETAIL_PIXELS, Pixels, read_pixels
from serve_app.images.refusal import ImageRefused, check_size
from serve_app.settings.images import ImageSettings

Decode = Callable[[Callable[[], Pixels]], Awaitable[Pixels]]
"""Runs work that decodes an image when it is its turn, and away from the event loop."""


@dataclass(frozen=True, slots=True)
class AskedImage:
    """An image of a request. `param`: its field's name."""

    url: str
    param: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


class ImageIntake:
    """Reads images for a model that takes them. `kind`: the kind of input that they become."""

    def __init__(self, kind: InputKind, settings: ImageSettings) -> None:
        self.kind = kind
        self._settings = settings
        self._most_pixels = min(kind.max_pixels, settings.max_tokens * kind.side**2)
        self._fetcher = Fetcher(
            [host.lower() for host in settings.allowed_hosts], settings.max_bytes, settings.fetch_timeout_s
        )

    async def read(self, images: Sequence[AskedImage], decode: Decode) -> list[Pixels]:
        """Fetch and decode images concurrently, and return them in order.

        Raises:
            ApiError: there are too many, or one is refused; the message names which, the limit and the value.
        """
        if len(images) > (most := self._settings.max_per_request):
            text = f"The request has {len(images)} images, and at most {most} are allowed (images.max_per_request)."
            raise ApiError(400, text, param=images[most].param, code="invalid_value")
        try:
            async with asyncio.TaskGroup() as group:
                reading = [group.create_task(self._read(image, decode)) for image in images]
        except* ApiError as refused:
            first = refused.exceptions[0]
        else:
            return [task.result() for task in reading]
        raise first

    async def _read(self, asked: AskedImage, decode: Decode) -> Pixels:
        try:
            if asked.url[: len(SCHEME)].lower() == SCHEME:
                return await decode(self._decoding(asked, None))
            if asked.url[:8].lower().startswith(("http://", "https://")):
                return await decode(self._decoding(asked, await self._fetcher.fetch(asked.url)))
            raise ImageRefused("its URL does not begin with data:, http:// or https://")
        except ImageRefused as error:
            raise ApiError(400, f"{asked.param}: the image is refused: {error}.", param=asked.param) from error

    def _decoding(self, asked: AskedImage, fetched: bytes | None) -> Callable[[], Pixels]:
        """Return the work of decoding an image. `fetched`: the file; None if it is in the URL."""
        limits = self._settings
        most = min(self._most_pixels, LOW_DETAIL_PIXELS) if asked.detail == "low" else self._most_pixels
        most = max(most, self.kind.min_pixels)

        def work() -> Pixels:
            file = read_data_url(asked.url, limits.max_bytes) if fetched is None else fetched
            check_size(len(file), limits.max_bytes)
            return read_pixels(file, self.kind, max_decoded=limits.max_pixels, max_shown=most)

        return work
