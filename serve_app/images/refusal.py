"""Defines the refusal of an image, with a message for whoever sent it.
Never says where in the request the image was: the code that reads the request does."""

from __future__ import annotations

TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
"""Maps the supported media types to Pillow's names."""


class ImageRefused(ValueError):
    """The image is refused. The message is safe to show, and names the limit and the value if there is one."""


def check_type(media_type: str) -> None:
    """Raise ImageRefused unless the type is one of TYPES."""
    if media_type not in TYPES:
        shown = media_type if len(media_type) <= 50 else media_type[:50] + "…"
        raise ImageRefused(f"its type is {shown or 'not given'}, and supported are {', '.join(TYPES)}")


def check_size(num_bytes: int, most: int) -> None:
    """Raise ImageRefused for a file that is too large."""
    if num_bytes > most:
        raise ImageRefused(f"it has {num_bytes} bytes or more, and at most {most} are read (images.max_bytes)")
