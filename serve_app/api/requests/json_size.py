"""Limits how many values a JSON body may have, before it is parsed: a parser holds the interpreter lock until its end.
Never parses, and never counts in short bodies."""

from __future__ import annotations

from serve_app.errors.api_error import ApiError

MAX_ITEMS = 2**20
"""The most items of lists and objects. The largest body that consists of four-digit token ids has fewer."""
KEY_ITEMS = 16
"""A key costs the parser as much as this many items, so the limit is about 30,000 messages of two keys."""
_NEVER_TOO_MANY = MAX_ITEMS // KEY_ITEMS  # bytes: a body of at most this length needs no count
_CHUNK = 2**16
_NEITHER = bytes(set(range(256)) - set(b'",:[{'))


def check_size(body: bytes) -> None:
    """Raises:
    ApiError: the body has more values than allowed.
    """
    if len(body) <= _NEVER_TOO_MANY:
        return
    num_items, num_keys = count(body)
    if num_items + KEY_ITEMS * num_keys > MAX_ITEMS:
        items = f"{num_items} items of lists and objects"
        counts = f"{items}, and {num_keys} keys, each of which counts as {KEY_ITEMS} items"
        raise ApiError(400, f"The body's JSON has {counts}; at most {MAX_ITEMS} are allowed.", code="too_many_values")


def count(body: bytes) -> tuple[int, int]:
    """Count the (items, keys) of JSON, as far as it is valid: commas and opening brackets outside of strings count as
    items, and colons as keys."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") + KEY_ITEMS * body.count(b":") <= MAX_ITEMS:
        return 0, 0  # the limit is not reached even when those within strings are counted
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NEITHER)
    num_items = num_keys = inside = 0
    for start in range(0, len(bare), _CHUNK):
        parts = bare[start : start + _CHUNK].split(b'"')
        outside = b"".join(parts[inside::2])
        num_keys += (colons := outside.count(b":"))
        num_items += len(outside) - colons
        inside = (inside + len(parts) - 1) % 2
    return num_items, num_keys
