"""Owns the requests of /v1/chat/completions and /v1/completions: fields, types, ranges, defaults.
Never reads text or tokens; what depends on the model (context length, vocabulary) is checked in `submission`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import MAX_LOGPROBS
from serve_app.api.deadline import MAX_TIMEOUT_MS
from serve_app.api.session import MAX_CHARS
from serve_app.api.strict_model import StrictModel, Unsupported
from serve_app.errors import ApiError, from_validation

MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 1024
DEFAULT_COMPLETION_TOKENS = 16

_ZERO, _OFF, _NO = (0,), (1,), (False,)
_NEVER: tuple[Any, ...] = ()

# Fields of OpenAI, vLLM and SGLang that would change the answer, with the values that would not.
_UNSUPPORTED: Unsupported = {
    "n": _OFF,
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "repetition_penalty": _OFF,
    "length_penalty": _OFF,
    "logit_bias": ({},),
    "bad_words": ([],),
    "use_beam_search": _NO,
    "include_stop_str_in_output": _NO,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": _NEVER,
    "truncate_prompt_tokens": _NEVER,
    "allowed_token_ids": _NEVER,
    "return_token_ids": _NO,
    "return_tokens_as_token_ids": _NO,
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("structured_outputs", "json_schema", "regex", "ebnf", "grammar", "stop_regex"), _NEVER),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _NEVER),
    **dict.fromkeys(("guided_json_object", "guided_decoding_backend", "guided_whitespace_pattern"), _NEVER),
    "priority": _ZERO,
    "cache_salt": _NEVER,
    "prompt_cache_options": ({},),
    "service_tier": ("auto", "default"),
}
_UNSUPPORTED_IN_CHAT: Unsupported = {
    **_UNSUPPORTED,
    "logprobs": _NO,
    "top_logprobs": _ZERO,
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools, both mean what happens anyway
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "add_generation_prompt": (True,),
    "add_special_tokens": _NO,
    "continue_final_message": _NO,
    "echo": _NO,
    "include_reasoning": (True,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    **dict.fromkeys(("chat_template", "audio", "prediction", "web_search_options", "moderation"), _NEVER),
}
_UNSUPPORTED_IN_COMPLETIONS: Unsupported = {
    **_UNSUPPORTED,
    "suffix": ("",),
    "best_of": _OFF,
    "add_special_tokens": (True,),
}


def _text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def _union(expected: str) -> Discriminator:
    return Discriminator(_text_or_list, custom_error_type="type", custom_error_message=f"should be {expected}")


class TextPart(StrictModel):
    unsupported: ClassVar[Unsupported] = dict.fromkeys(
        ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal"), _NEVER
    )
    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<list>")], _union("a string or a list of text parts")
]


class Message(StrictModel):
    unsupported: ClassVar[Unsupported] = {"tool_calls": ([],), "annotations": ([],)} | dict.fromkeys(
        ("function_call", "refusal", "audio"), _NEVER
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, str]:
        """Parts become one string, a line each: most templates know no others."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": text} | {key: value for key, value in named.items() if value is not None}


class StreamOptions(StrictModel):
    unsupported: ClassVar[Unsupported] = {"include_obfuscation": _NO, "continuous_usage_stats": _NO}
    include_usage: bool | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    _union("a string or a list of strings"),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class GenerationRequest(StrictModel):
    """What chat and plain completions share. Null always means the default."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 and -1 keep all tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0)
    """Neither stop tokens nor stop strings end the answer before this many tokens."""
    ignore_eos: bool | None = None
    timeout_ms: int | None = Field(None, ge=1, le=MAX_TIMEOUT_MS)
    """The answer ends with an error after this long."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    prompt_cache_key: str | None = Field(None, max_length=MAX_CHARS)
    """Requests of one key go to the same engine while its load allows."""

    # Accepted and without effect: they label a request for whoever keeps accounts, and never change an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            text = "only allowed when stream is true"
            raise PydanticCustomError("options", "{text}", {"text": text, "field": "stream_options"})
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    unsupported: ClassVar[Unsupported] = _UNSUPPORTED_IN_CHAT
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    """Wins over max_tokens, which it replaces."""


def _single_prompt(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError("prompts", "several prompts in a request are not supported; send one each")
        return value[0]
    return value


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[Unsupported] = _UNSUPPORTED_IN_COMPLETIONS
    prompt: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[TokenId], Field(fail_fast=True), Tag("<list>")],
        _union("a string or a list of token ids"),
        BeforeValidator(_single_prompt),
    ]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    """The answer's text begins with the prompt's."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Each token's log-probability, and this many alternatives; with `echo`, the prompt's tokens' too."""

    @model_validator(mode="after")
    def _an_answer_has_text(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            text = "should be at least 1 unless echo is true, but it is 0: there would be nothing to answer"
            raise PydanticCustomError("nothing", "{text}", {"text": text, "field": "max_tokens"})
        return self


RequestT = TypeVar("RequestT", bound=GenerationRequest)
ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_request(kind: type[ModelT], body: bytes) -> ModelT:
    """Read a JSON body.

    Raises:
        ApiError: 400, with the dotted name of the first field that is wrong.
    """
    try:
        # Refuses NaN, lone surrogates, bytes that are not UTF-8 and deep nesting, all as ValueError.
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_value")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from error
