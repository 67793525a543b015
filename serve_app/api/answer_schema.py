"""Owns what answers look like, for the OpenAPI document; tests hold real answers against it.
Never makes an answer: most are written for every token, and a model's checks would cost each one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from engine.protocol import LoadSnapshot
from serve_app.admission.gate import GateSnapshot

FinishReason = Literal["stop", "length"]


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    """The field that is wrong, with dots: `messages.0.role`."""
    code: str | None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class ErrorEnvelope(BaseModel):
    error: Error


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class AssistantDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatChunkChoice(BaseModel):
    index: int
    delta: AssistantDelta
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    """Null in the chunks of a stream but the last."""


class _Answer(BaseModel):
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


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Detokenized(BaseModel):
    prompt: str


class SpecialToken(BaseModel):
    id: int
    text: str


class TokenizerInfo(BaseModel):
    model: str
    vocab_size: int
    bos_token_id: int | None
    bos_token: str | None
    eos_token_id: int | None
    eos_token: str | None
    special_tokens: list[SpecialToken]
    has_chat_template: bool


class Version(BaseModel):
    version: str


class Load(BaseModel):
    engines: list[LoadSnapshot]
    ingress: GateSnapshot


class Aborted(BaseModel):
    request_id: str
    aborted: Literal[True]


class Draining(BaseModel):
    draining: bool


class DroppedBlocks(BaseModel):
    dropped_blocks: list[int]
    """Of each engine."""
