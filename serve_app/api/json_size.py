"""Owns how much a body of JSON may hold, counted before it is parsed: a parser holds the interpreter lock to its end.
Never parses, and judges no body that is short."""

from __future__ import annotations

from serve_app.errors import ApiError

MAX_ITEMS = 2**20
"""Items of lists and objects. A body of nothing but token ids of four digits has fewer."""
MAX_KEYS = 2**16
"""Keys of objects, each of which costs as much as ten items: as many as 30,000 messages have."""
_NEVER_TOO_MANY = MAX_KEYS  # bytes: a body that is no longer needs no count
_CHUNK = 2**16
_NEITHER = bytes(set(range(256)) - set(b'",:[{'))


def check_size(body: bytes) -> None:
    """Raises:
    ApiError: it holds more than is taken.
    """
    if len(body) <= _NEVER_TOO_MANY:
        return
    num_items, num_keys = count(body)
    for found, most, what in ((num_items, MAX_ITEMS, "items of lists and objects"), (num_keys, MAX_KEYS, "keys")):
        if found > most:
            text = f"The body's JSON has {found} {what}, and at most {most} are taken."
            raise ApiError(400, text, code="too_many_values")


def count(body: bytes) -> tuple[int, int]:
    """(items, keys) of valid JSON; of other, up to what a parser sees of it: items are commas and opening brackets, and
    keys are colons, where they are outside of strings."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= MAX_ITEMS and body.count(b":") <= MAX_KEYS:
        return 0, 0  # not even with those in strings
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NEITHER)
    num_items = num_keys = inside = 0
    for start in range(0, len(bare), _CHUNK):
        parts = bare[start : start + _CHUNK].split(b'"')
        outside = b"".join(parts[inside::2])
        num_keys += (colons := outside.count(b":"))
        num_items += len(outside) - colons
        inside = (inside + len(parts) - 1) % 2
    return num_items, num_keys
