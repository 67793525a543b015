"""Owns what answers look like, for the OpenAPI document; tests hold real answers against it.
Never makes an answer: most are written for every token, and a model's checks would cost each one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.protocol import LoadSnapshot
from serve_app.admission.gate import GateSnapshot

FinishReason = Literal["stop", "length"]


class Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Error(Shape):
    message: str
    type: str
    param: str | None
    """The field that is wrong, with dots: `messages.0.role`."""
    code: str | None
    n_prompt_tokens: int = 0
    """With the code `context_length_exceeded`: how long the prompt is."""
    n_ctx: int = 0
    """With the same code: how long prompt and answer may be together."""


class ErrorEnvelope(Shape):
    error: Error


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class AssistantDelta(Shape):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatChunkChoice(Shape):
    index: int
    delta: AssistantDelta
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class TextChoice(Shape):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    """Null in the chunks of a stream but the last."""


class _Answer(Shape):
    id: str
    created: int
    model: str


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class CompletionChunk(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None


class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Longest prompt and answer together, in tokens."""


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []
    """Where `return_token_strs` asks for them: the vocabulary's entries."""


class Detokenized(Shape):
    prompt: str


class SpecialToken(Shape):
    id: int
    text: str


class TokenizerInfo(Shape):
    model: str
    vocab_size: int
    bos_token_id: int | None
    bos_token: str | None
    eos_token_id: int | None
    eos_token: str | None
    special_tokens: list[SpecialToken]
    has_chat_template: bool


class Version(Shape):
    version: str


class Load(Shape):
    engines: list[LoadSnapshot]
    ingress: GateSnapshot


class Aborted(Shape):
    request_id: str
    aborted: Literal[True]


class Draining(Shape):
    draining: bool


class DroppedBlocks(Shape):
    dropped_blocks: list[int]
    """Of each engine."""
