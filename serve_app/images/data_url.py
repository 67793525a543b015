"""Reads images that are part of the request itself, as data URLs (RFC 2397).
Never reads anything from elsewhere."""

from __future__ import annotations

import binascii

from serve_app.images.refusal import ImageRefused, check_size, check_type

SCHEME = "data:"


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Return the file in `data:image/png;base64,...`.

    Raises:
        ImageRefused: the URL has another form or type, or the file is too large.
    """
    head, comma, payload = url[len(SCHEME) :].partition(",")
    media_type, *parameters = head.split(";")
    if not comma or parameters[-1:] != ["base64"]:
        raise ImageRefused("its data URL is not written data:image/png;base64,...")
    check_type(media_type.lower())
    check_size(len(payload) // 4 * 3 - payload[-2:].count("="), max_bytes)
    try:
        return binascii.a2b_base64(payload, strict_mode=True)
    except (binascii.Error, ValueError) as error:  # ValueError if it is not ASCII
        raise ImageRefused(f"its data URL is not base64: {str(error).lower()}") from error
