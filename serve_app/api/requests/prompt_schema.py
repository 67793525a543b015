"""Defines the shapes of a prompt that is not a conversation: a text, token ids, or a list of either.
Never knows the vocabulary."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Discriminator, Field, Tag

from serve_app.api.requests.unions import text_or_list

MAX_CHOICES = 128
"""The most choices of one response, which are prompts times `n`."""
MAX_INPUTS = 2048
"""The most inputs of one request for embeddings, as OpenAI has it: clients send them by the thousand."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return "<texts>" if isinstance(value[0], str) else "<lists>"
    return text_or_list(value)


_KINDS = "a string, a list of token ids, or a list of strings or of lists of token ids"
_BY_KIND = Discriminator(_kind_of_prompt, custom_error_type="type", custom_error_message=f"should be {_KINDS}")
_One = Annotated[str, Tag("<text>")] | Annotated[TokenIds, Tag("<list>")]
Prompt = Annotated[
    _One
    | Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True), Tag("<texts>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES, fail_fast=True), Tag("<lists>")],
    _BY_KIND,
]
Inputs = Annotated[
    _One
    | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("<texts>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("<lists>")],
    _BY_KIND,
]


def as_prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts as a list, also if a single one was given."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return cast(list[str | list[int]], list(given))
    return [cast(str | list[int], given)]
