"""Describes the answers' JSON for the OpenAPI document; tests check real answers against it.
Never makes an answer: most are written once per token, and validation would slow down each of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engine.protocol import LoadSnapshot
from serve_app.admission.gate import GateSnapshot
from serve_app.metrics.activity import EngineActivity, IngressActivity
from serve_app.metrics.timing import Ahead, TimePart

FinishReason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class Error(Shape):
    message: str
    type: str
    param: str | None
    """The field at fault, as a dotted path: `messages.0.role`."""
    code: str | None
    n_prompt_tokens: int = 0
    """The prompt's length in tokens, with the code `context_length_exceeded`."""
    n_ctx: int = 0
    """The limit of prompt and answer together in tokens, with the same code."""


class ErrorEnvelope(Shape):
    error: Error


class PromptTokensDetails(Shape):
    cached_tokens: int


class CompletionTokensDetails(Shape):
    reasoning_tokens: int
    """The tokens before the content begins."""


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Present in chats with a model that marks its thoughts."""


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """A vector of length 1; in base64 if the request asks for it."""


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
    """The JSON as the model wrote it."""


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
    """Sent with the name, only in the first delta of a call."""
    type: Literal["function"] = "function"
    function: FunctionDelta


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    """Null if the model only called tools."""
    refusal: str | None
    annotations: list[dict[str, Any]]
    """Always empty."""
    reasoning: str | None
    """The model's thoughts, if it marks them."""
    reasoning_content: str | None
    """The same as `reasoning`, by its other name."""
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
    """1 means that no token was more likely. Null for a token outside the alternatives if an engine of an older
    version answered."""
    decoded_token: str


class _OfPrompt(Shape):
    prompt_token_ids: list[int] | None
    """Present if `return_token_ids` asks for them."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    """Present if the request asks for them: null for the first token, then each token's alternatives by token id."""


class _Stop(Shape):
    stop_reason: str | int | None
    """vLLM's field: the stop string, or the id of the token, that ended the answer; null for the end of sequence."""
    matched_stop: str | int | None
    """SGLang's field: the same, but the token's id also for the end of sequence."""


class _ChunkStop(Shape):
    stop_reason: str | int | None = None
    """Set in the last chunk: the stop string, or the token's id, that ended the answer; null for the end of
    sequence."""
    matched_stop: str | int | None = None
    """Set in the last chunk: the same, but the token's id also for the end of sequence."""


class _Choice(Shape):
    index: int
    logprobs: dict[str, Any] | None


class ChatChoice(_Choice, _Stop):
    message: AssistantMessage
    finish_reason: FinishReason
    token_ids: list[int] | None
    """Present if `return_token_ids` asks for them."""


class ChatChunkChoice(_Choice, _ChunkStop):
    delta: AssistantDelta
    finish_reason: FinishReason | None
    token_ids: list[int] = []
    """Present if `return_token_ids` asks for them."""


class TextChoice(_Choice, _OfPrompt, _Stop):
    text: str
    finish_reason: FinishReason
    token_ids: list[int] | None
    """Present if `return_token_ids` asks for them."""


class TextChunkChoice(_Choice, _ChunkStop):
    text: str
    finish_reason: FinishReason | None
    """Null except in the last chunk."""
    token_ids: list[int] | None
    """Present if `return_token_ids` asks for them."""
    prompt_token_ids: list[int] | None
    """Likewise, in the first chunk."""


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
    """Present in the first chunk if `return_token_ids` asks for them."""
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
    """The name that requests give as `model`."""
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The name of the model that answers, or that the adapter adapts."""
    parent: str | None
    """For an adapter, the name of the model that it adapts."""
    max_model_len: int
    """The limit of prompt and answer together, in tokens."""
    context_length: int
    """The same by OpenRouter's name."""
    context_window: int
    """The same by Groq's name."""
    capabilities: list[Literal["completion", "tools", "vision", "thinking", "embedding"]] | None
    """Named as in Ollama. Null if the request has the header `anthropic-version`, and so wants Anthropic's type."""
    type: Literal["model"]
    display_name: str
    """The same as `id`; Anthropic's clients show it."""
    created_at: str
    """The same as `created`, in the form that Anthropic's clients read."""
    # Present only if the request has the header `anthropic-version`.
    max_input_tokens: int | None = None
    """The limit of prompt and answer together, too."""
    max_tokens: int | None = None
    """The same."""
    lifecycle: Literal["active"] | None = None
    deprecated_at: None = None
    retires_at: None = None
    line: None = None


class ModelList(Shape):
    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str
    models: list[Any] = []
    """Always empty. Present only if the request has Codex's `client_version`."""


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens' entries in the vocabulary, if `return_token_strs` asks for them."""


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


class ModelLoad(Shape):
    engines: list[LoadSnapshot]
    ingress: GateSnapshot
    error: Error | None = None
    """Why `engines` is empty, if they did not answer. If no model's did, the whole answer is an error."""


class Load(Shape):
    engines: list[LoadSnapshot]
    ingress: GateSnapshot
    models: dict[str, ModelLoad] = {}
    """The same of each model, by its name; there only if there are several."""


class RequestTiming(Shape):
    object: Literal["request.timing"]
    id: str | None
    """That of the answer; null if the request was refused before it had one."""
    request_id: str
    """The X-Request-Id."""
    status: Literal["complete", "error", "incomplete", "client_gone"]
    wall_ms: float
    """From the arrival of the headers until the server had sent the last byte: the sum of all parts."""
    first_token_ms: float | None
    own: list[TimePart]
    """The request's own work, the largest part first."""
    slowed_by: list[TimePart]
    """Everything else, the largest part first."""
    ahead: Ahead | None
    """What was before the request when it came to its engine; null if no engine has told."""
    migrations: int
    """How often it went on at another engine."""


class ModelActivity(Shape):
    model: str
    engines: list[str]
    """The names of its engines."""


class Activity(Shape):
    model: str
    """The first, if there are several."""
    engines: list[EngineActivity]
    ingresses: list[IngressActivity]
    num_missing: int
    """The number of replicas that did not answer."""
    models: list[ModelActivity] = []
    """There only if there are several."""


class Aborted(Shape):
    request_id: str
    aborted: Literal[True]


class Draining(Shape):
    draining: bool


class ModelDroppedBlocks(Shape):
    dropped_blocks: list[int]
    error: Error | None = None
    """Why it is empty, if an engine of the model did not answer: others of its engines may have dropped theirs."""


class DroppedBlocks(Shape):
    dropped_blocks: list[int]
    """The number of blocks dropped by each engine, in its KV cache and in its tiers. A block that was in several places
    counts in each."""
    models: dict[str, ModelDroppedBlocks] = {}
    """The same of each model, by its name; there only if there are several."""
