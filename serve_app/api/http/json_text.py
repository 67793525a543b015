"""Writes large JSON in short steps, because one call of the C encoder holds the interpreter lock however long it takes.
Never changes what is written: the text is the same as that of a single call."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

from starlette.responses import Response

_STEP = 1024
"""Numbers and texts that one call writes, which takes about a millisecond."""
_LONG = 64
"""A list with more items than this is written in steps."""

_CONTAINERS = (dict, list, tuple, array)

Encode = Callable[[Any], str]
_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_response(value: Any) -> Response:
    """Make a response like Starlette's JSONResponse, but write its body in steps."""
    return Response(json_bytes(value), media_type="application/json")


def json_bytes(value: Any) -> bytes:
    """Write JSON. Nothing is in memory twice: vectors may take hundreds of megabytes."""
    buffer = BytesIO()
    for part in _all_parts(value, _plain):
        buffer.write(part.encode())
    return buffer.getvalue()


def written(value: Any, encode: Encode) -> str:
    """Write what `encode` would, in steps, so that other threads run in between. Arrays are written as lists. `encode`
    must put no space between items."""
    return "".join(_all_parts(value, encode))


def _all_parts(value: Any, encode: Encode) -> Iterator[str]:
    long: set[int] = set()
    _find_long(value, long)
    return _parts(value, encode, long)


def _parts(value: Any, encode: Encode, long: set[int]) -> Iterator[str]:
    if id(value) not in long:
        yield encode(value)
    elif isinstance(value, dict):
        opening = "{"
        for key, inner in value.items():
            yield f"{opening}{encode(key)}:"
            yield from _parts(inner, encode, long)
            opening = ","
        yield "}"
    else:
        opening = "["
        for start in range(0, len(value), _STEP):
            items = value[start : start + _STEP]
            for part in _step(items.tolist() if isinstance(items, array) else items, encode, long):
                yield opening + part
                opening = ","
        yield "]" if len(value) else "[]"


def _step(items: Sequence[Any], encode: Encode, long: set[int]) -> Iterator[str]:
    """Write some items of a list, without the commas around them."""
    if any(map(_is_container, items)):
        for item in items:
            yield "".join(_parts(item, encode, long))
    else:
        yield encode(items)[1:-1]


def _find_long(value: Any, long: set[int]) -> bool:
    """Whether the value is or contains a long list. `long` gets the ids of all values in it that are or contain one.
    Each value is visited once: a search at every level of a deep value would take seconds."""
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, array):  # whatever its length: `encode` knows no arrays
        long.add(id(value))
        return True
    else:
        return False
    found = len(inner) > _LONG and not isinstance(value, dict)
    for one in inner:
        if isinstance(one, _CONTAINERS) and _find_long(one, long):
            found = True
    if found:
        long.add(id(value))
    return found


def _is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)
