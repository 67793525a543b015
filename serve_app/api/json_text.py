"""Owns JSON of any size, written and measured in short steps: one call of the C encoder or parser is one turn at the
interpreter lock, however long it takes. Never changes what is written: the text is that of a single call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import Response

_STEP = 1024
"""Numbers and texts that one call writes: about a millisecond."""
_LONG = 64
"""Items from which on a list is written in steps."""

Encode = Callable[[Any], str]
_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_response(value: Any) -> Response:
    """Starlette's JSONResponse, whose body is written in steps."""
    return Response(written(value, _plain), media_type="application/json")


def written(value: Any, encode: Encode) -> str:
    """What `encode` writes, which sets no space between items. In steps, between which other threads run."""
    return "".join(_parts(value, encode)) if _has_long(value) else encode(value)


def _parts(value: Any, encode: Encode) -> Iterator[str]:
    if not _has_long(value):
        yield encode(value)
    elif isinstance(value, dict):
        opening = "{"
        for key, inner in value.items():
            yield f"{opening}{encode(key)}:"
            yield from _parts(inner, encode)
            opening = ","
        yield "}"
    else:
        opening = "["
        for start in range(0, len(value), _STEP):
            for part in _step(value[start : start + _STEP], encode):
                yield opening + part
                opening = ","
        yield "]"


def _step(items: Sequence[Any], encode: Encode) -> Iterator[str]:
    """The items of a list, between their commas."""
    if any(map(_is_container, items)):
        for item in items:
            yield "".join(_parts(item, encode))
    else:
        yield encode(items)[1:-1]


def _has_long(value: Any) -> bool:
    """Whether it is or has a long list."""
    if isinstance(value, dict):
        return any(map(_has_long, value.values()))
    if isinstance(value, list | tuple):
        return len(value) > _LONG or any(map(_has_long, value))
    return False


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
