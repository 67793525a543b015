"""Turns an image file into the pixels that an engine takes: decodes it within limits, and scales it to whole tokens.
Never normalises: the engine gets 8-bit pixels, which are an eighth of the size that its encoder makes of them."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

from PIL import Image, ImageOps

from engine.multimodal_inputs import Grid, InputKind
from serve_app.images.refusal import TYPES, ImageRefused

MOST_UNEQUAL = 200
"""The largest ratio of an image's sides."""
LOW_DETAIL_PIXELS = 512 * 512
"""The most pixels of an image with low detail, as with OpenAI."""

Image.MAX_IMAGE_PIXELS = None  # Pillow's limit would only warn: `read_pixels` refuses, by this server's own limit


class Pixels(NamedTuple):
    """`data`: uint8 of the shape [rows * side, columns * side, 3]. `grid`: (1, rows, columns)."""

    grid: Grid
    data: bytes


def read_pixels(file: bytes, kind: InputKind, *, max_decoded: int, max_shown: int) -> Pixels:
    """Read an image from a file, and scale it in proportion to between `kind.min_pixels` and `max_shown` pixels.

    Raises:
        ImageRefused: the file is not an image, or has more than `max_decoded` pixels, or more than one frame.
    """
    try:
        with Image.open(io.BytesIO(file), formats=tuple(TYPES.values())) as opened:
            _check(opened, max_decoded)
            upright = ImageOps.exif_transpose(_in_8_bits(opened)).convert("RGB")
    except ImageRefused:
        raise
    except Exception as error:  # decoders raise all kinds of exceptions for anything but an image
        raise ImageRefused(f"it cannot be read as one of {', '.join(TYPES)}") from error
    width, height = scaled_size(upright.width, upright.height, kind, max_shown)
    if width * height > max(max_shown, kind.min_pixels):
        size = f"{upright.width} x {upright.height}"
        raise ImageRefused(f"it has {size} pixels: one side is too long for the size to which it is scaled")
    shown = upright.resize((width, height), Image.Resampling.BICUBIC)
    return Pixels((1, height // kind.side, width // kind.side), shown.tobytes())


def _check(opened: Image.Image, max_decoded: int) -> None:
    """Check an image by its header, before anything is decoded."""
    width, height = opened.size
    if width * height > max_decoded:
        raise ImageRefused(
            f"it has {width} x {height} pixels, and at most {max_decoded} are decoded (images.max_pixels)"
        )
    if max(width, height) > MOST_UNEQUAL * min(width, height):
        raise ImageRefused(f"it has {width} x {height} pixels, and its sides may be at most 1 : {MOST_UNEQUAL}")
    # The further pictures of a JPEG are smaller copies of the first, its depth or its gain map, as phones write them.
    if opened.format != "MPO" and getattr(opened, "n_frames", 1) > 1:
        raise ImageRefused("it is an animation, and only single pictures are allowed")


def _in_8_bits(opened: Image.Image) -> Image.Image:
    """Scale the greys of a 16-bit PNG, which Pillow would clip instead. It reads all other modes in 8 bits."""
    return opened.point(lambda grey: grey * (1 / 256)) if opened.mode.startswith("I") else opened


def scaled_size(width: int, height: int, kind: InputKind, max_shown: int) -> tuple[int, int]:
    """Return the nearest (width, height) in whole tokens; if it is too small or too large, one scaled in proportion to
    fit."""

    def whole(length: float) -> int:
        return max(int(length), 1) * kind.side

    sides = (width, height)
    nearest = tuple(max(round(length / kind.side), 0) * kind.side for length in sides)
    area = nearest[0] * nearest[1]
    if area > max_shown:
        scale = math.sqrt(width * height / max_shown)
        return whole(width / scale / kind.side), whole(height / scale / kind.side)
    if area < kind.min_pixels:
        scale = math.sqrt(kind.min_pixels / (width * height))
        return math.ceil(width * scale / kind.side) * kind.side, math.ceil(height * scale / kind.side) * kind.side
    return nearest[0], nearest[1]
