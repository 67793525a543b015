"""Owns what answers look like, for the OpenAPI document; tests hold real answers against it.
Never makes an answer: most are written for every token, and a model's checks would cost each one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.protocol import LoadSnapshot
from serve_app.admission.gate import GateSnapshot
from serve_app.metrics.activity import EngineActivity, IngressActivity

FinishReason = Literal["stop", "length", "tool_calls"]


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


class CompletionTokensDetails(Shape):
    reasoning_tokens: int
    """Tokens before the content begins."""


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Of chats with a model that marks what it thinks."""


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Of length 1; as base64 where that was asked for."""


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Shape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class CalledFunction(Shape):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(Shape):
    name: str = ""
    arguments: str = ""


class ToolCallDelta(Shape):
    index: int
    id: str = ""
    """With the name, in the first delta of a call only."""
    type: Literal["function"] = "function"
    function: FunctionDelta


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    """Null where the model only called tools."""
    refusal: str | None
    annotations: list[dict[str, Any]]
    """Empty."""
    reasoning: str | None
    """What the model thought, for models that mark it."""
    reasoning_content: str | None
    """The same by its other name."""
    tool_calls: list[ToolCall] = []


class AssistantDelta(Shape):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class PromptLogprob(Shape):
    logprob: float
    rank: int | None
    """1: no token was more likely. Null, for a token that is not among the alternatives, where an engine of an older
    version answered."""
    decoded_token: str


class _OfPrompt(Shape):
    prompt_token_ids: list[int] | None
    """Where `return_token_ids` asks for them."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    """Where they are asked for: null for the first token, and for each other its alternatives by token id."""


class _Stop(Shape):
    stop_reason: str | int | None
    """vLLM's: the stop string, or the id of the token, that ended the answer; null for the end of sequence."""
    matched_stop: str | int | None
    """SGLang's: the same, with the id of the end of sequence."""


class _ChunkStop(Shape):
    stop_reason: str | int | None = None
    """In the last chunk: the stop string, or the token's id, that ended the answer; null for the end of sequence."""
    matched_stop: str | int | None = None
    """In the last chunk: the same, with the id of the end of sequence."""


class _Choice(Shape):
    index: int
    logprobs: dict[str, Any] | None


class ChatChoice(_Choice, _Stop):
    message: AssistantMessage
    finish_reason: FinishReason
    token_ids: list[int] | None
    """Where `return_token_ids` asks for them."""


class ChatChunkChoice(_Choice, _ChunkStop):
    delta: AssistantDelta
    finish_reason: FinishReason | None
    token_ids: list[int] = []
    """Where `return_token_ids` asks for them."""


class TextChoice(_Choice, _OfPrompt, _Stop):
    text: str
    finish_reason: FinishReason
    token_ids: list[int] | None
    """Where `return_token_ids` asks for them."""


class TextChunkChoice(_Choice, _ChunkStop):
    text: str
    finish_reason: FinishReason | None
    """Null but in the last chunk."""
    token_ids: list[int] | None
    """Where `return_token_ids` asks for them."""
    prompt_token_ids: list[int] | None
    """The same, in the first chunk."""


class _Answer(Shape):
    id: str
    created: int
    model: str


class ChatCompletion(_Answer, _OfPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"]
    prompt_token_ids: list[int] = []
    """Where `return_token_ids` asks for them, in the first chunk."""
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class CompletionChunk(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class Model(Shape):
    id: str
    """What can be asked for."""
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The name of the model that answers, or is adapted."""
    parent: str | None
    """Names the model that an adapter is for."""
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    context_length: int
    """The same, as OpenRouter calls it."""
    context_window: int
    """The same, as Groq calls it."""
    capabilities: list[Literal["completion", "tools", "vision", "thinking", "embedding"]]
    """In Ollama's words."""
    type: Literal["model"]
    display_name: str
    """The id: Anthropic's clients show it."""
    created_at: str
    """`created` as they read it."""


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str
    models: list[Any] = []
    """Empty, and only where Codex asks with its `client_version`."""


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
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


class Activity(Shape):
    model: str
    engines: list[EngineActivity]
    ingresses: list[IngressActivity]
    num_missing: int
    """Replicas that did not answer."""


class Aborted(Shape):
    request_id: str
    aborted: Literal[True]


class Draining(Shape):
    draining: bool


class DroppedBlocks(Shape):
    dropped_blocks: list[int]
    """Of each engine."""
