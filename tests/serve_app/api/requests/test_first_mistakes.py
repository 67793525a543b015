"""Owns the promise that a body with very many mistakes costs no more than one with a few: the reading of a list stops
at its first. Never asks what a mistake is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from serve_app.api.anthropic.schema import CountTokensRequest, MessagesRequest
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import ChatRequest, CompletionRequest, parse_request
from serve_app.api.requests.text_schema import DetokenizeRequest, TokenizeRequest
from serve_app.errors.api_error import ApiError

REQUESTS = (
    *(ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, MessagesRequest),
    *(CountTokensRequest, TokenizeRequest, DetokenizeRequest),
)
MOST_MISTAKES = 1024
"""The most items of a list that is read to its end."""


def lists_in(schema: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the lists of pydantic's own schema of a request, with those of all objects in it."""
    if not isinstance(schema, dict | list | tuple) or id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(schema, dict) and schema.get("type") in ("list", "set", "frozenset", "tuple"):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema:
        yield from lists_in(inner, seen)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_list_of_a_request_is_read_to_its_first_mistake_or_is_short(kind: type[BaseModel]) -> None:
    """Regression: a million numbers in `documents` or `annotations` were a million mistakes, which held the interpreter
    for three seconds, in which no stream moved, and took a gigabyte."""
    found = list(lists_in(kind.__pydantic_core_schema__, set()))
    assert found
    for one in found:
        assert one.get("fail_fast") or one.get("max_length", MOST_MISTAKES + 1) <= MOST_MISTAKES, one


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        (
            ChatRequest,
            b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "documents": [1, 1]}',
            "documents",
        ),
        (
            ResponsesRequest,
            b'{"model": "m", "input": [{"type": "shell_call_output", "call_id": "a", "output": [1, 1]}]}',
            "input.0.output",
        ),
    ],
)
def test_only_the_first_mistake_is_told(kind: type[BaseModel], body: bytes, place: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(kind, body)
    assert caught.value.message == f"{place}.0: Input should be a valid dictionary"
