"""Owns the way from a file to the pixels that an engine takes: decoding within limits, and scaling to whole tokens.
Never normalises: 8-bit pixels cross to the engine, an eighth of what its encoder makes of them."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

from PIL import Image, ImageOps

from engine.multimodal_inputs import Grid, InputKind
from serve_app.images.refusal import TYPES, ImageRefused

MOST_UNEQUAL = 200
"""How many times as long as the other a side may be."""
LOW_DETAIL_PIXELS = 512 * 512
"""Of an image that is asked to be seen in low detail, as at OpenAI."""

Image.MAX_IMAGE_PIXELS = None  # which warns and goes on: `read_pixels` refuses, and by this server's own limit


class Pixels(NamedTuple):
    """`data` is [rows * side, columns * side, 3] of uint8, and `grid` (1, rows, columns)."""

    grid: Grid
    data: bytes


def read_pixels(file: bytes, kind: InputKind, *, max_decoded: int, max_shown: int) -> Pixels:
    """The image in a file, scaled to between `kind.min_pixels` and `max_shown` pixels, sides in proportion.

    Raises:
        ImageRefused: it is no image, or has more than `max_decoded` pixels, or more than one frame.
    """
    try:
        with Image.open(io.BytesIO(file), formats=tuple(TYPES.values())) as opened:
            _check(opened, max_decoded)
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except ImageRefused:
        raise
    except Exception as error:  # decoders raise what they like when they are given anything but an image
        raise ImageRefused(f"it cannot be read as one of {', '.join(TYPES)}") from error
    width, height = scaled_size(upright.width, upright.height, kind, max_shown)
    if width * height > max(max_shown, kind.min_pixels):
        raise ImageRefused(f"it has {upright.width} x {upright.height} pixels, too long a side for what is shown of it")
    shown = upright.resize((width, height), Image.Resampling.BICUBIC)
    return Pixels((1, height // kind.side, width // kind.side), shown.tobytes())


def _check(opened: Image.Image, max_decoded: int) -> None:
    """Before anything is decoded: the header says the size."""
    width, height = opened.size
    if width * height > max_decoded:
        raise ImageRefused(
            f"it has {width} x {height} pixels, and at most {max_decoded} are decoded (images.max_pixels)"
        )
    if max(width, height) > MOST_UNEQUAL * min(width, height):
        raise ImageRefused(f"it has {width} x {height} pixels, and sides of at most 1 : {MOST_UNEQUAL} are taken")
    if getattr(opened, "n_frames", 1) > 1:
        raise ImageRefused("it is an animation, and one picture is taken")


def scaled_size(width: int, height: int, kind: InputKind, max_shown: int) -> tuple[int, int]:
    """(width, height) in whole tokens: the nearest, and where that is too small or too large, in proportion to fit."""

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
