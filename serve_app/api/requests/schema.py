"""Owns the requests of /v1/chat/completions and /v1/completions: fields, types, ranges, defaults.
Never reads text or tokens; what depends on the model (context length, vocabulary) is checked in `submission`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import MAX_LOGPROBS
from serve_app.api.requests import foreign_fields as foreign
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

DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(StrictModel):
    unsupported: ClassVar[Unsupported] = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Every chunk tells the usage so far; with `include_usage` only, as at vLLM."""


class UsageOptions(StrictModel):
    """OpenRouter's. A whole answer tells its usage in any case."""

    include: bool | None = None
    """A stream ends with the usage, as with `stream_options.include_usage`."""


class GenerationRequest(StrictModel):
    """What chat and plain completions share. Null always means the default."""

    value_hints: ClassVar[Mapping[str, str]] = foreign.VALUE_HINTS
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 and -1 keep all tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: int | None = Field(None, ge=0)
    """Neither stop tokens nor stop strings end the answer before this many tokens."""
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Answers to each prompt. With a seed, the i-th answer has the seed's i-th successor."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    """Ollama's and llama.cpp's name of `repetition_penalty`."""
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    """The answer will not contain these, as they are tokenized at its beginning and after a space."""
    allowed_token_ids: AllowedTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    """The answer ends with the stop string, or the stop token's text, that ended it."""
    skip_special_tokens: bool | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probability of each of the prompt's tokens, its rank, and this many alternatives; not in a stream."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens `token_id:7`, and not by their texts."""
    return_token_ids: bool | None = None
    """The answer has the ids of its tokens, and of the prompt's."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Keep that many of the prompt's last tokens; -1 keeps as many as fit."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CHARS)
    """Only requests of the same salt share cached prefixes: nobody can time another's prompt."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """A lower number is computed earlier, among the requests that an engine holds."""
    response_format: ResponseFormat | None = None
    """What the answer's text is; of this and the four fields below, at most one."""
    structured_outputs: StructuredOutputs | None = None
    json_schema: Written | None = None
    """A JSON schema as text: SGLang's name of `structured_outputs.json`."""
    regex: Written | None = None
    """SGLang's name of `structured_outputs.regex`."""
    ebnf: Written | None = None
    """SGLang's name of `structured_outputs.grammar`."""
    timeout_ms: int | None = Field(None, ge=1, le=MAX_TIMEOUT_MS)
    """The answer ends with an error after this long."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    provider: Provider | None = None

    prompt_cache_key: str | None = Field(None, max_length=MAX_CHARS)
    """Requests of one key go to the same engine while its load allows."""

    user: str | None = None
    """A label for the client's own accounts, as are the two below: they ask for nothing."""
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
                "should be equal to repetition_penalty, whose other name it is, but they are "
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
        """The fields that say what the answer's text is."""
        return [
            name
            for name in ("response_format", "structured_outputs", "json_schema", "regex", "ebnf")
            if getattr(self, name) is not None and not isinstance(getattr(self, name), TextFormat)
        ]

    @property
    def constrained_by(self) -> str | None:
        """A field that constrains the answer."""
        return next(iter(self.constraints), None)

    @property
    def stops(self) -> tuple[str, ...]:
        """An empty string stops nothing."""
        stop = self.stop or ()
        return tuple(text for text in ((stop,) if isinstance(stop, str) else stop) if text)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        of_options = self.stream_options is not None and self.stream_options.include_usage
        return bool(of_options or (self.usage is not None and self.usage.include))

    @property
    def limit_field(self) -> str:
        """What the client calls the most tokens of an answer."""
        return "max_tokens"

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1


class ChatRequest(GenerationRequest, ThinkingFields):
    unsupported: ClassVar[Unsupported] = foreign.UNSUPPORTED_IN_CHAT
    hints: ClassVar[Unsupported] = foreign.HINTS_IN_CHAT
    value_hints: ClassVar[Mapping[str, str]] = foreign.VALUE_HINTS_IN_CHAT
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    """Wins over max_tokens, which it replaces."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """`auto`, the default, lets the model call any of the tools; with `none` it is not told of them. With `required`
    the answer is one call or more, with a function's name one call of it, by the tools' schemas, strict or not."""
    parallel_tool_calls: bool | None = None
    """False: at most one call, and of an answer that is not constrained only the first is shown."""
    include_reasoning: bool | None = None
    """False: what a reasoning model thinks is not shown."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What this model's chat template knows besides, such as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant begins to speak; the default."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message, instead of a new one."""
    logprobs: bool | None = None
    """Each token's log-probability, and `top_logprobs` alternatives."""
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
        """A `response_format` is of a text beside the calls, of which there is none; the others are of all that the
        model writes."""
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
        """Whether the call was chosen by the client."""
        return isinstance(self.tool_choice, NamedFunction)

    @property
    def may_call(self) -> bool:
        """Whether the model is told of tools."""
        return bool(self.tools) and self.tool_choice != "none"

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
    """The answer's text begins with the prompt's."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Each token's log-probability, and this many alternatives; with `echo`, the prompt's tokens' too."""

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
        ApiError: 400, with the dotted name of the first field that is wrong, or for more values than are taken.
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
