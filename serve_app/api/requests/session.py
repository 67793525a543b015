"""Reads a client's session name, which sends its requests to the engine that has their prefix cached.
Never changes an answer: a session only influences where it is computed."""

from __future__ import annotations

import re

from serve_app.errors.api_error import ApiError, clip

HEADER = "X-Session-ID"
MAX_CHARS = 128
PATTERN = rf"[A-Za-z0-9._~:/+=@-]{{1,{MAX_CHARS}}}"


def session_of(header: str | None, prompt_cache_key: str | None) -> str | None:
    """Return the session that the header names, or else the body.

    Raises:
        ApiError: 400, the header is empty or too long, or has characters that are not safe to log.
    """
    if header is None:
        return prompt_cache_key or None
    if re.fullmatch(PATTERN, header):
        return header
    text = f"{HEADER} should be 1 to {MAX_CHARS} letters, digits or ._~:/+=@-, but it is {clip(header, 50)!r}."
    raise ApiError(400, text, param=HEADER, code="invalid_value")
