"""Owns the fields of requests, as types: those of the server's routes that have a meaning without a server.
Never checks a value: the server's own schemas do, when a request is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from chunkserve.errors import RequestRefused

Message = Mapping[str, Any]
"""A message as in `/v1/chat/completions`: `{"role": "user", "content": "Hello"}`."""


class GenerationFields(TypedDict, total=False):
    """Fields of chats and of plain prompts. docs/reference/api-fields.md says what each means, and its limits."""

    model: str
    """The name of a LoRA adapter of `lora_adapters`; without it the model itself answers."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    min_tokens: int | None
    ignore_eos: bool | None
    n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    cache_salt: str | None
    priority: int | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    timeout_ms: int | None
    slo_tpot_ms: float | None
    slo_ttft_ms: float | None


class CompletionFields(GenerationFields, total=False):
    """Fields of a plain prompt, as of `/v1/completions`; `max_tokens` is 16 if it is not given."""

    echo: bool | None
    logprobs: int | None


class ChatFields(GenerationFields, total=False):
    """Fields of a chat, as of `/v1/chat/completions`; without `max_tokens` an answer may fill the context."""

    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    reasoning_effort: str | None
    enable_thinking: bool | None
    thinking_budget: int | None


class EmbeddingFields(TypedDict, total=False):
    """Fields of texts whose vectors are asked for, as of `/v1/embeddings`."""

    model: str
    truncate_prompt_tokens: int | None
    priority: int | None
    timeout_ms: int | None


def refuse_unknown(kind: type, given: Mapping[str, Any]) -> None:
    """Raises RequestRefused: a field is not one of `kind`, a class of this module."""
    known = kind.__annotations__.keys()  # with those of its bases
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise RequestRefused(f"{name}: this field is not known{hint}", "unknown_parameter", name)
