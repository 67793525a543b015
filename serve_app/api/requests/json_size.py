"""Owns how much a body of JSON may hold, counted before it is parsed: a parser holds the interpreter lock to its end.
Never parses, and judges no body that is short."""

from __future__ import annotations

from serve_app.errors.api_error import ApiError

MAX_ITEMS = 2**20
"""Items of lists and objects. A body of nothing but token ids of four digits has fewer."""
KEY_ITEMS = 16
"""A key costs a parser as much: 30,000 messages of two keys are as much as is taken."""
_NEVER_TOO_MANY = MAX_ITEMS // KEY_ITEMS  # bytes: a body that is no longer needs no count
_CHUNK = 2**16
_NEITHER = bytes(set(range(256)) - set(b'",:[{'))


def check_size(body: bytes) -> None:
    """Raises:
    ApiError: it holds more than is taken.
    """
    if len(body) <= _NEVER_TOO_MANY:
        return
    num_items, num_keys = count(body)
    if num_items + KEY_ITEMS * num_keys > MAX_ITEMS:
        told = f"{num_items} items of lists and objects, and {num_keys} keys, each of which counts as {KEY_ITEMS} items"
        raise ApiError(400, f"The body's JSON has {told}; at most {MAX_ITEMS} are taken.", code="too_many_values")


def count(body: bytes) -> tuple[int, int]:
    """(items, keys) of valid JSON; of other, up to what a parser sees of it: items are commas and opening brackets, and
    keys are colons, where they are outside of strings."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") + KEY_ITEMS * body.count(b":") <= MAX_ITEMS:
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
