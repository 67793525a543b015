"""Defines the requests of /v1/chat/completions and /v1/completions: fields, types, ranges, defaults.
Never reads text or tokens; `submission` checks what depends on the model (context length, vocabulary)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import MAX_LOGPROBS, MAX_TARGET_MS
from serve_app.api.requests import foreign_fields as foreign
from serve_app.api.requests.content_parts import shown
from serve_app.api.requests.deadline import MAX_TIMEOUT_MS
from serve_app.api.requests.json_finite import check_finite
from serve_app.api.requests.json_size import check_size
from serve_app.api.requests.messages import Message, Tools
from serve_app.api.requests.prompt_schema import MAX_CHOICES, Prompt, as_prompts
from serve_app.api.requests.provider import Provider
from serve_app.api.requests.session import MAX_CHARS
from serve_app.api.requests.stop_schema import Stop
from serve_app.api.requests.strict_model import UNSUPPORTED, StrictModel, Unsupported
from serve_app.api.requests.structured import ResponseFormat, StructuredOutputs, TextFormat, Written
from serve_app.api.requests.thinking_fields import ReasoningRequest, ThinkingFields
from serve_app.api.requests.token_fields import AllowedTokenIds, BadWords, LogitBias, PromptLogprobs, StopTokenIds
from serve_app.api.requests.tool_choice import NamedFunction, ToolChoice, must_call, names_of
from serve_app.errors.api_error import ApiError, from_validation
from serve_app.settings.sampling import MinP, RepetitionPenalty, Temperature, TopK, TopP

DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(StrictModel):
    unsupported: ClassVar[Unsupported] = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far. Needs `include_usage`, as in vLLM."""


class UsageOptions(StrictModel):
    """OpenRouter's option. A whole answer always has its usage."""

    include: bool | None = None
    """A stream ends with the usage, as with `stream_options.include_usage`."""


class GenerationRequest(StrictModel):
    """The fields that chat and plain completions share. Null always means the default."""

    value_hints: ClassVar[Mapping[str, str]] = foreign.VALUE_HINTS
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    """0 and -1 keep all tokens."""
    min_p: MinP | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: int | None = Field(None, ge=0)
    """Neither stop tokens nor stop strings end the answer before this many tokens."""
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """The number of answers to each prompt. With a `seed`, choice *i* uses `seed + i`."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """Ollama's and llama.cpp's name for `repetition_penalty`."""
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    """Words that the answer must not contain, each as it is tokenized at the beginning of a text and after a space."""
    allowed_token_ids: AllowedTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    """Include the stop string, or the stop token's text, at the end of the answer."""
    skip_special_tokens: bool | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Return the log-probability and rank of each prompt token, with this many alternatives; not in a stream."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as `token_id:7` instead of by their texts."""
    return_token_ids: bool | None = None
    """Return the ids of the answer's and the prompt's tokens."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Keep only that many of the prompt's last tokens; -1 keeps as many as fit."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CHARS)
    """Only requests with the same salt share cached prefixes, so that nobody can probe another's prompt by timing."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Among the requests that an engine holds, lower numbers are computed first."""
    response_format: ResponseFormat | None = None
    """Constrains the answer's text. At most one of this and the four fields below may be set."""
    structured_outputs: StructuredOutputs | None = None
    json_schema: Written | None = None
    """A JSON schema as text: SGLang's name for `structured_outputs.json`."""
    regex: Written | None = None
    """SGLang's name for `structured_outputs.regex`."""
    ebnf: Written | None = None
    """SGLang's name for `structured_outputs.grammar`."""
    timeout_ms: int | None = Field(None, ge=1, le=MAX_TIMEOUT_MS)
    """After this long, the answer ends with an error."""
    slo_tpot_ms: float | None = Field(None, ge=1, le=MAX_TARGET_MS)
    """The request's own target between two tokens. A longer one than the server's leaves more time for others' prompts;
    a shorter one has no effect."""
    slo_ttft_ms: float | None = Field(None, ge=1, le=MAX_TARGET_MS)
    """The request's own target for its first token. With a longer one than the server's it lets others go first; a
    shorter one has no effect."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    provider: Provider | None = None

    prompt_cache_key: str | None = Field(None, max_length=MAX_CHARS)
    """Requests with the same key go to the same engine as long as its load allows."""

    user: str | None = None
    """A label for the client's own records, without effect, as are the two fields below."""
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _guided_has_other_names(cls, data: Any) -> Any:
        for name in foreign.GUIDED if isinstance(data, dict) else ():
            if data.get(name) is not None:
                text = f"this field is not supported by the server; use {foreign.GUIDED[name]}"
                raise PydanticCustomError("guided", "{text}", {"text": text, "field": name, "code": UNSUPPORTED})
        return data

    @model_validator(mode="after")
    def _one_says_what_the_text_is(self) -> GenerationRequest:
        if len(fields := self.constraints) > 1:
            text = f"not allowed together with {fields[0]}: one of them says what the answer is"
            raise PydanticCustomError("constraints", "{text}", {"text": text, "field": fields[1]})
        return self

    @model_validator(mode="after")
    def _one_penalty_of_repetition(self) -> GenerationRequest:
        if (
            None not in (self.repeat_penalty, self.repetition_penalty)
            and self.repeat_penalty != self.repetition_penalty
        ):
            text = (
                "should be equal to repetition_penalty, which has the same meaning, but they are "
                f"{self.repeat_penalty:g} and {self.repetition_penalty:g}"
            )
            raise PydanticCustomError("penalties", "{text}", {"text": text, "field": "repeat_penalty"})
        return self

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            text = "only allowed when stream is true"
            raise PydanticCustomError("options", "{text}", {"text": text, "field": "stream_options"})
        return self

    @model_validator(mode="after")
    def _prompts_are_scored_whole(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            text = "not allowed when stream is true"
            raise PydanticCustomError("scores", "{text}", {"text": text, "field": "prompt_logprobs"})
        return self

    @property
    def constraints(self) -> list[str]:
        """The names of the set fields that constrain the answer's text."""
        return [
            name
            for name in ("response_format", "structured_outputs", "json_schema", "regex", "ebnf")
            if getattr(self, name) is not None and not isinstance(getattr(self, name), TextFormat)
        ]

    @property
    def constrained_by(self) -> str | None:
        """The name of the field that constrains the answer, if one does."""
        return next(iter(self.constraints), None)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, without empty ones, which stop nothing."""
        stop = self.stop or ()
        return tuple(text for text in ((stop,) if isinstance(stop, str) else stop) if text)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        by_options = self.stream_options is not None and self.stream_options.include_usage
        return bool(by_options or (self.usage is not None and self.usage.include))

    @property
    def limit_field(self) -> str:
        """The name of the field by which the client limits an answer's tokens."""
        return "max_tokens"

    @property
    def num_choices(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1


class ChatRequest(GenerationRequest, ThinkingFields):
    unsupported: ClassVar[Unsupported] = foreign.UNSUPPORTED_IN_CHAT
    hints: ClassVar[Unsupported] = foreign.HINTS_IN_CHAT
    value_hints: ClassVar[Mapping[str, str]] = foreign.VALUE_HINTS_IN_CHAT
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    """Replaces `max_tokens`, and wins if both are set."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """`auto`, the default, lets the model call any of the tools; with `none` it does not get them. With `required` the
    answer is one or more calls, with a function's name one call of it; these follow the tools' schemas, strict or not.
    """
    parallel_tool_calls: bool | None = None
    """If false, the answer has at most one call: without constraints, only the first call is shown."""
    include_reasoning: bool | None = None
    """If false, a reasoning model's thoughts are not shown."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of this model's chat template, such as `enable_thinking`."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant's message begins, which is the default."""
    continue_final_message: bool | None = None
    """Continue the last message instead of beginning a new one."""
    logprobs: bool | None = None
    """Return each token's log-probability, with `top_logprobs` alternatives."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            text = "only allowed when logprobs is true"
            raise PydanticCustomError("alternatives", "{text}", {"text": text, "field": "top_logprobs"})
        return self

    @model_validator(mode="after")
    def _the_end_of_the_prompt_is_one(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt:
            text = "not allowed together with continue_final_message"
            raise PydanticCustomError("prompt_end", "{text}", {"text": text, "field": "add_generation_prompt"})
        return self

    @property
    def continued(self) -> str:
        """The text that the answer continues; empty if it begins a message."""
        text = shown(self.messages[-1].content) if self.continue_final_message else ""
        return text if isinstance(text, str) else ""

    @model_validator(mode="after")
    def _calls_are_of_tools(self) -> ChatRequest:
        given = {tool.function.name for tool in self.tools or ()}
        unknown = next((name for name in names_of(self.tool_choice) or () if name not in given), None)
        if unknown is not None and self.tools:
            text = f"names the function {unknown!r}, which is not among the tools"
        elif self.tool_choice not in (None, "auto", "none") and not self.tools:
            text = "only allowed when there are tools"
        else:
            return self
        raise PydanticCustomError("tool_choice", "{text}", {"text": text, "field": "tool_choice"})

    @model_validator(mode="after")
    def _forced_calls_are_the_answer(self) -> ChatRequest:
        """Allow `response_format` with forced calls, because it only constrains text beside calls, and there is none.
        The other fields constrain everything that the model writes."""
        if self.must_call and self.constraints and self.constraints != ["response_format"]:
            text = f"not allowed together with {self.constraints[0]}: one of them says what the answer is"
            raise PydanticCustomError("constraints", "{text}", {"text": text, "field": "tool_choice"})
        return self

    @property
    def constrained_by(self) -> str | None:
        if not self.may_call or (self.constraints and not self.must_call):
            return super().constrained_by
        if self.tool_choice not in (None, "auto"):
            return "tool_choice"
        return "tools" if any(tool.function.strict for tool in self.tools or ()) else None

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def must_call(self) -> bool:
        return must_call(self.tool_choice)

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning or ReasoningRequest()).exclude

    @property
    def names_function(self) -> bool:
        """Whether the client chose the function to call."""
        return isinstance(self.tool_choice, NamedFunction)

    @property
    def may_call(self) -> bool:
        """Whether the model gets tools that it may call."""
        return bool(self.tools) and self.tool_choice != "none"

    @cached_property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as a chat template and the readers of calls get them, which must not change them. Made once, and
        not for each of a hundred answers: an agent's thousand tools take up to a quarter of a second."""
        return [tool.for_template() for tool in self.tools or ()]

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with each token's log-probability; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[Unsupported] = foreign.UNSUPPORTED_IN_COMPLETIONS
    hints: ClassVar[Unsupported] = foreign.HINTS
    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    """Repeat the prompt's text at the beginning of the answer's."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Return each token's log-probability, with this many alternatives; with `echo`, the prompt's tokens', too."""

    @model_validator(mode="after")
    def _an_answer_has_text(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            text = "should be at least 1 unless echo is true, but it is 0: there would be nothing to answer"
            raise PydanticCustomError("nothing", "{text}", {"text": text, "field": "max_tokens"})
        return self

    @model_validator(mode="after")
    def _not_too_many_choices(self) -> CompletionRequest:
        if (count := len(self.prompts) * self.num_choices) > MAX_CHOICES:
            text = f"should give at most {MAX_CHOICES} choices with all prompts, but it gives {count}"
            raise PydanticCustomError("choices", "{text}", {"text": text, "field": "n"})
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to show with each token's log-probability; None: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @model_validator(mode="after")
    def _prompts_are_scored_once(self) -> CompletionRequest:
        if None not in (self.prompt_logprobs, self.logprobs) and self.echo and self.prompt_logprobs != self.logprobs:
            text = f"should be equal to logprobs with echo, but they are {self.prompt_logprobs} and {self.logprobs}"
            raise PydanticCustomError("scores", "{text}", {"text": text, "field": "prompt_logprobs"})
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt)


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_request(kind: type[ModelT], body: bytes) -> ModelT:
    """Read a JSON body.

    Raises:
        ApiError: 400, with the dotted name of the first wrong field, or because the body has too many values.
    """
    try:
        check_size(body)
        # Refuses NaN, lone surrogates, bytes that are not UTF-8 and deep nesting, all as ValueError.
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_value")
    check_finite(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from error
