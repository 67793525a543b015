"""Defines a request's stop strings: their number and their lengths.
Never searches for one: `stop_strings` does."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from serve_app.api.requests.unions import text_or_list_of

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_STOP_CHARS_TOGETHER = 4000
"""Limits the search: every token's text is compared with the beginning of each stop string."""

StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


def _not_too_long(stops: list[str]) -> list[str]:
    if (count := sum(map(len, stops))) > MAX_STOP_CHARS_TOGETHER:
        text = f"should have at most {MAX_STOP_CHARS_TOGETHER} characters together, but it has {count}"
        raise PydanticCustomError("stops", "{text}", {"text": text})
    return stops


StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(_not_too_long)]
Stop = Annotated[
    Annotated[str, Field(max_length=MAX_STOP_CHARS), Tag("<text>")] | Annotated[StopList, Tag("<list>")],
    text_or_list_of("a string or a list of strings"),
]
"""An empty text stops nothing."""
