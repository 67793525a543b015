"""Reads a route's body into a request and a form, and defines the form, which turns the answer's pieces into JSON.
Never asks an engine; a form is made when the answer has been requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from serve_app.api.generation.chat_reader import ChatReader, make_reader, needs_reader, prompt_end
from serve_app.api.generation.completion import Piece
from serve_app.api.openai.choices import Choices
from serve_app.api.openai.response import ChatShape, Envelope, Json, Shape, Shown, TextShape, usage_json
from serve_app.api.openai.sse import ChunkFrames, Frames, UsageShown
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    parse_request,
)
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest, EmbeddingRequest)


@dataclass(frozen=True, slots=True)
class Answering:
    """What a form is made from: an answer that an engine was asked for. `request_id`: the answer's public id. `header`:
    the request's id in the response's headers."""

    request_id: str
    tokenizer: Tokenizer
    model: ServedModel
    choices: Choices
    header: str

    def reader(self, request: ChatRequest) -> ChatReader:
        """Make a reader for one answer to the first prompt."""
        return make_reader(request, self.model, prompt_end(self.tokenizer, self.choices.prompts[0].token_ids))


class Form(Protocol):
    @property
    def num_repeated(self) -> int:
        """About how many bytes of the request the answer has again."""
        return 0

    def body(self, pieces: Sequence[Piece]) -> Json:
        """Write the whole answer. `pieces`: each choice as one piece."""
        ...

    async def keep(self, body: Json) -> None:
        """Do what is to be done with a whole answer before it is sent."""
        return

    def frames(self) -> Frames: ...


@dataclass(frozen=True, slots=True)
class ParsedRequest(Generic[RequestT]):
    """A parsed body: the request for the engine, and the form of the answer."""

    request: RequestT
    form: Callable[[Answering], Form]
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps field names of a chat request to the body's own names for them, if they differ."""

    def renamed(self, error: ApiError) -> ApiError:
        """Name the error's field as the body does."""
        return renamed(error, self.names)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Replace field names in an error: ours -> theirs. A name that is also a word, such as `messages`, is only taken as
    a field at the beginning of the text."""
    param, message = error.param, error.message
    for ours, theirs in names.items():
        if param is None or ours not in param or (ours.isalpha() and not param.startswith(ours)):
            continue
        param = param.replace(ours, theirs, 1)
        if message.startswith(ours) or not ours.isalpha():
            message = message.replace(ours, theirs, 1)
    headers, details = error.headers, error.details
    return ApiError(
        error.status, message, type=error.type, param=param, code=error.code, headers=headers, details=details
    )


@dataclass(frozen=True, slots=True)
class ChoicesForm(Form):
    """Answers with OpenAI's bodies and chunks that have `choices`."""

    envelope: Envelope
    choices: Choices
    usage: UsageShown

    def body(self, pieces: Sequence[Piece]) -> Json:
        return self.envelope.body(
            pieces, self.choices.prompts, usage_json(self.choices.usage, self.choices.reasoning_tokens)
        )

    def frames(self) -> Frames:
        return ChunkFrames(self.choices, self.envelope, self.usage)


def read_chat(body: bytes) -> ParsedRequest[ChatRequest]:
    request = parse_request(ChatRequest, body)

    def form(answering: Answering) -> Form:
        reads = needs_reader(request, answering.model)
        make = (lambda: answering.reader(request)) if reads else None
        shape = ChatShape(
            answering.tokenizer, _shown_of(request, answering.tokenizer), make, names_function=request.names_function
        )
        return _choices_form(request, answering, shape)

    return ParsedRequest(request, form)


def read_completion(body: bytes) -> ParsedRequest[CompletionRequest]:
    request = parse_request(CompletionRequest, body)

    def form(answering: Answering) -> Form:
        return _choices_form(
            request, answering, TextShape(answering.tokenizer, _shown_of(request, answering.tokenizer))
        )

    return ParsedRequest(request, form)


def _choices_form(request: GenerationRequest, answering: Answering, shape: Shape) -> Form:
    envelope = Envelope(answering.request_id, answering.model.id, shape)
    return ChoicesForm(envelope, answering.choices, _usage_shown_of(request))


def _shown_of(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer) -> Shown:
    eos = tokenizer.eos_token_id
    return Shown(
        request.num_logprobs is not None,
        bool(request.return_token_ids),
        request.prompt_logprobs is not None,
        bool(request.return_tokens_as_token_ids),
        None if eos in (request.stop_token_ids or ()) else eos,
    )


def _usage_shown_of(request: GenerationRequest) -> UsageShown:
    options = request.stream_options or StreamOptions()
    at_end = request.includes_usage
    return UsageShown(at_end, at_end and bool(options.continuous_usage_stats))
