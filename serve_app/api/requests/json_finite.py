"""Refuses numbers that JSON can write but a float cannot hold: a parser reads 1e999 as infinite, which no answer could
write again. Never looks at the meaning of a field."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from serve_app.errors.api_error import MAX_PARAM_CHARS, ApiError, clip


def check_finite(data: Any) -> None:
    """Raises:
    ApiError: a number in parsed JSON is infinite; the message names its place.
    """
    open_values = [data]
    while open_values:
        value = open_values.pop()
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, dict | list):
                open_values.append(one)
            elif type(one) is float and math.isinf(one):
                place = clip(next(_places(data, "")), MAX_PARAM_CHARS)
                text = f"{place}: should be a number of at most 1.8e308, but it is larger than a float can be"
                raise ApiError(400, text, param=place, code="invalid_value")


def _places(value: Any, place: str) -> Iterator[str]:
    """Find the places of infinite numbers."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, float) and math.isinf(value):
        yield place
