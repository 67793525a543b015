"""Stands for the types of requests and responses that ray.serve.llm takes from vLLM: OpenAI's fields, and any other.
Never checks a value: what is wrong with a request, the server behind it says."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Request(_Open):
    model: str | None = None
    request_id: str = "made up"


class ChatCompletionRequest(_Request):
    messages: list[dict[str, Any]]
    stream: bool = False
    max_tokens: int | None = None


class CompletionRequest(_Request):
    prompt: Any
    stream: bool = False
    max_tokens: int = 16


class EmbeddingRequest(_Request):
    input: Any


class ScoringRequest(_Request):
    query: Any = None


class TokenizeRequest(_Open):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(_Open):
    model: str | None = None
    tokens: list[int] = Field(default_factory=list)


class ChatMessage(_Open):
    role: str
    annotations: dict[str, Any] | None = None
    """vLLM's type: OpenAI's own is a list."""


class ChatCompletionResponseChoice(_Open):
    message: ChatMessage


class ChatCompletionResponse(_Open):
    choices: list[ChatCompletionResponseChoice]


class CompletionResponse(_Open):
    choices: list[dict[str, Any]]


class ChatCompletionStreamResponse(_Open):
    pass


class CompletionStreamResponse(_Open):
    pass


class EmbeddingResponse(_Open):
    data: list[dict[str, Any]]


class ScoringResponse(_Open):
    pass


class TokenizeResponse(_Open):
    tokens: list[int]


class DetokenizeResponse(_Open):
    prompt: str
