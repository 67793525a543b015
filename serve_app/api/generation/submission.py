"""Turns a request into the engine's submissions: encodes it, prepares the echo, and checks it against the model's
limits. Never blocks the event loop for long: long texts are encoded in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.multimodal_inputs import SpanInput
from engine.protocol import SamplingParams, Submission
from serve_app.api.generation.answer_limits import check_copies, check_lists, check_scores
from serve_app.api.generation.chat_reader import markers, prompt_end
from serve_app.api.generation.constraint import Constraint, Patiently, constraint_of
from serve_app.api.generation.image_prompt import EncodedChat, place_images, read_images, turns
from serve_app.api.generation.template_options import template_options
from serve_app.api.http.offload import INLINE_SIZE, part_size, run_sized
from serve_app.api.requests.hints import hints
from serve_app.api.requests.schema import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest
from serve_app.api.text.chat_template import TemplateFailed
from serve_app.api.text.detokenizer import Detokenizer
from serve_app.api.text.echo import Echo, read_ids, read_text
from serve_app.api.text.tokenizer import Tokenizer, TooManyTokens
from serve_app.engines.engine_client import SamplingDefaults, ServedModel
from serve_app.errors.api_error import ApiError, context_length_exceeded

_MANY_TURNS = 1024
_TURN_CHARS = 64
"""The cost of rendering a message without text, as a number of characters that would cost as much to encode."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that one answer starts from. With an echo, the detokenizer has already read the prompt."""

    submission: Submission
    detokenizer: Detokenizer
    stops: tuple[str, ...] = ()
    shows_stop: bool = False
    """Whether the text ends with the stop string or token that ended it."""
    shows_tokens: bool = False
    """Whether pieces say which tokens they are made of."""
    echo: Echo | None = None
    """The prompt's text, which precedes the answer, with its tokens' log-probabilities if the submission asks for them.
    """
    constrained_by: str | None = None
    """The request's field from which the submission's grammar was made."""


async def prepare_chat(
    request: ChatRequest, request_id: str, tokenizer: Tokenizer, model: ServedModel, patiently: Patiently
) -> list[list[Prepared]]:
    """Prepare the answers to a chat's single prompt.

    Raises:
        ApiError, RequestRejected: the request cannot be served as asked.
    """
    wanted = request.max_completion_tokens or request.max_tokens
    most = None if request.truncate_prompt_tokens is not None else model.max_model_len
    try:
        prompt = await encode_conversation(request, tokenizer, model, most=most)
    except TooManyTokens as error:
        raise prompt_too_long(error, model, wanted, "messages") from error
    if prompt.inputs and request.truncate_prompt_tokens is not None:
        text = "A conversation with images is not truncated: leave truncate_prompt_tokens out."
        raise ApiError(400, text, param="truncate_prompt_tokens", code="invalid_value")
    constraint = await constraint_of(request, tokenizer, model, patiently)
    sampling = await _sampling(request, tokenizer, model.sampling)
    maker = _Maker(request, request_id, tokenizer, model, wanted, None, sampling, constraint, prompt.inputs)
    return [await maker.group(prompt.token_ids, None, "messages", 0, 0)]


async def encode_conversation(
    request: ChatRequest,
    tokenizer: Tokenizer,
    model: ServedModel,
    *,
    add_special_tokens: bool = False,
    most: int | None = None,
) -> EncodedChat:
    """Encode a conversation as a prompt. `add_special_tokens`: add the tokenizer's to those that the template writes.

    Raises:
        ApiError: the model's chat template refuses the conversation, or an image is refused.
        TooManyTokens: the prompt has more than `most` tokens, each image counted as one.
    """
    images = await read_images(request.messages, model)
    options = template_options(request, tokenizer, model) | {"add_special_tokens": add_special_tokens}

    def encode() -> list[int]:
        tools = request.shown_tools if request.may_call else None
        return tokenizer.encode_chat(turns(request.messages), most, tools=tools, **options)

    try:
        token_ids = await run_sized(_size(request), encode)
    except TemplateFailed as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error
    return EncodedChat(token_ids) if model.images is None else place_images(token_ids, images, model.images.kind)


def _size(request: ChatRequest) -> int:
    """Estimate how many characters are rendered and encoded. Where only rendering could tell, return more than the
    event loop may take."""
    if request.tools or request.documents or request.chat_template_kwargs or len(request.messages) > _MANY_TURNS:
        return max(INLINE_SIZE + 1, _TURN_CHARS * len(request.messages))
    return sum(_TURN_CHARS + message.num_chars for message in request.messages)


async def prepare_completion(
    request: CompletionRequest, request_id: str, tokenizer: Tokenizer, model: ServedModel, patiently: Patiently
) -> list[list[Prepared]]:
    """Prepare the answers to each prompt.

    Raises:
        ApiError, RequestRejected: the request cannot be served as asked.
    """
    constraint = await constraint_of(request, tokenizer, model, patiently)
    wanted, default = request.max_tokens, DEFAULT_COMPLETION_TOKENS
    sampling = await _sampling(request, tokenizer, model.sampling)
    maker = _Maker(request, request_id, tokenizer, model, wanted, default, sampling, constraint)
    most = None if request.truncate_prompt_tokens is not None else model.max_model_len
    groups = []
    num_chars, num_tokens = text_chars(request.prompts), 0
    for number, given in enumerate(request.prompts):
        param = "prompt" if len(request.prompts) == 1 else f"prompt.{number}"
        try:
            prompt, text = await encode_prompt(given, tokenizer, param, most, num_chars)
        except TooManyTokens as error:
            raise prompt_too_long(error, model, wanted, param) from error
        groups.append(await maker.group(prompt, text, param, number * request.num_choices, num_tokens))
        num_tokens += len(groups[-1][0].submission.prompt_token_ids)
    return groups


def text_chars(prompts: Sequence[str | list[int]]) -> int:
    """Return how many characters are to be encoded."""
    return sum(len(given) for given in prompts if isinstance(given, str))


async def encode_prompt(
    given: str | list[int], tokenizer: Tokenizer, param: str, most: int | None, num_chars: int
) -> tuple[list[int], str | None]:
    """Return a prompt's tokens, and its text if it was given as text. `num_chars`: those of all prompts of the request.

    Raises:
        ApiError: an id is not in the vocabulary.
        TooManyTokens: there are more than `most`.
    """
    if isinstance(given, str):
        size = part_size(len(given), num_chars)
        return await run_sized(size, lambda: tokenizer.encode(given, most=most)), given
    if most is not None and len(given) > most:
        raise TooManyTokens(len(given), is_exact=True)
    if (largest := max(given, default=0)) >= tokenizer.vocab_size:
        text = f"Token id {largest} is out of vocabulary: this model's ids are 0 to {tokenizer.vocab_size - 1}."
        raise ApiError(400, text, param=param, code="invalid_value")
    return given, None


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the answers of one request from what they have in common."""

    request: ChatRequest | CompletionRequest
    request_id: str
    tokenizer: Tokenizer
    model: ServedModel
    wanted: int | None
    default: int | None
    """The answer's token limit if the request sets none; None is as many as the context holds."""
    sampling: SamplingParams
    """Complete, except for what depends on the prompt and the choice."""
    constraint: Constraint | None
    inputs: tuple[SpanInput, ...] = ()

    async def group(
        self, prompt: list[int], text: str | None, param: str, first: int, num_before: int
    ) -> list[Prepared]:
        """Prepare the answers to one prompt, which are the choices from index `first` on. `text`: the prompt's text, if
        it was given as text. `num_before`: the tokens of the request's prompts before this one. Long values are made
        once and shared: there may be a hundred answers."""
        request = self.request
        kept = truncated(prompt, request.truncate_prompt_tokens, self.model.max_model_len, self.wanted)
        allowed = answer_tokens(kept, self.wanted, self.default, self.model, param, self.request.limit_field)
        num_tokens = num_before + len(kept)
        check_scores(len(kept), num_tokens, request)
        sampling = replace(self.sampling, max_tokens=allowed)
        if self.constraint is not None:
            sampling = replace(sampling, grammar=self.constraint.text(prompt_end(self.tokenizer, kept)))
        check_copies(len(kept), self.inputs, sampling.grammar, request.num_choices)
        given, token_ids = text if kept is prompt else None, tuple(kept)
        choices = [replace(sampling, seed=_successor(request.seed, number)) for number in range(request.num_choices)]
        detokenizer, echo = self._detokenizer(), None
        if _echoes(request):
            size = part_size(len(token_ids), num_tokens)
            echo = await run_sized(size, lambda: self._echo(token_ids, given, detokenizer))
        elif _continues(request):
            detokenizer.follow(token_ids)
        return [
            self._prepared(token_ids, one, first + number, detokenizer.copy(), echo)
            for number, one in enumerate(choices)
        ]

    def _detokenizer(self) -> Detokenizer:
        request = self.request
        shown = markers(request, self.model) if isinstance(request, ChatRequest) else ()
        return self.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens is not False, shown=shown)

    def _prepared(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        index: int,
        detokenizer: Detokenizer,
        echo: Echo | None,
    ) -> Prepared:
        request = self.request
        request_id = self.request_id if request.num_choices == 1 and index == 0 else f"{self.request_id}-{index}"
        return Prepared(
            Submission(
                request_id,
                token_ids,
                sampling,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                inputs=self.inputs,
                adapter=self.model.adapter,
            ),
            detokenizer,
            request.stops,
            bool(request.include_stop_str_in_output),
            request.num_logprobs is not None or bool(request.return_token_ids),
            echo=echo,
            constrained_by=None if self.constraint is None else self.constraint.field,
        )

    def _echo(self, prompt: Sequence[int], given: str | None, detokenizer: Detokenizer) -> Echo:
        specials = self.tokenizer.special_texts
        if given is not None:
            return read_text(prompt, given, detokenizer, specials)
        return read_ids(prompt, detokenizer, self.tokenizer.detokenizer(skip_special_tokens=False), specials)


def _echoes(request: ChatRequest | CompletionRequest) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo)


def _continues(request: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer's text continues that of the prompt. A chat's answer begins a message, unless it continues
    one."""
    return isinstance(request, CompletionRequest) or bool(request.continue_final_message)


def truncated(prompt: list[int], most: int | None, limit: int, wanted: int | None) -> list[int]:
    """Keep the prompt's last `most` tokens; -1 keeps as many as leave room for the answer. An answer that may take the
    whole context, or more, gets the room that the prompt leaves."""
    if most is None:
        return prompt
    if most == -1:
        most = limit - (1 if wanted is None or wanted >= limit else wanted)
    return prompt if len(prompt) <= most else prompt[len(prompt) - most :]


def answer_tokens(
    prompt: list[int],
    wanted: int | None,
    default: int | None,
    model: ServedModel,
    param: str,
    limit_field: str = "max_tokens",
) -> int | None:
    """Return how many tokens the answer may have; None is as many as the context holds.

    A limit above what is left is reduced to it. The response reports that as an ignored `limit_field`, unless the limit
    was a default.

    Raises:
        ApiError: the prompt is empty, or leaves no room; or the server is strict, and more is asked for than is left.
    """
    if not prompt:
        raise ApiError(400, "The prompt is empty.", param=param, code="empty_prompt")
    limit, left = model.max_model_len, model.max_model_len - len(prompt)
    if left < (0 if wanted == 0 else 1):
        raise prompt_too_long(TooManyTokens(len(prompt), is_exact=True), model, wanted, param)
    if wanted is None:
        return default if default is None else min(default, left)
    if wanted > left and hints().strict:
        head = _head(limit, str(len(prompt)))
        text = f"{head} and {wanted} were requested for the answer; at most {left} are left for it."
        raise context_length_exceeded(text, param=param, limit=limit, n_prompt_tokens=len(prompt))
    if wanted > left:
        hints().ignore(limit_field)
    return min(wanted, left)


def prompt_too_long(found: TooManyTokens, model: ServedModel, wanted: int | None, param: str) -> ApiError:
    """`wanted`: the tokens asked for as an answer; with 0 there is no answer."""
    counted = f"{found.num_tokens}" if found.is_exact else f"at least {found.num_tokens}"
    tail = "." if wanted == 0 else ", and the answer needs one more."
    text, limit = f"{_head(model.max_model_len, counted)}{tail}", model.max_model_len
    return context_length_exceeded(text, param=param, limit=limit, n_prompt_tokens=found.num_tokens)


def _head(limit: int, counted: str) -> str:
    return f"This model's maximum context length is {limit} tokens. However, your prompt contains {counted} tokens"


async def _sampling(
    request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, otherwise: SamplingDefaults
) -> SamplingParams:
    """Make the parameters that all answers share: all but their seeds, and `max_tokens`, which depends on the
    prompt."""
    bad_words = request.bad_words or ()
    banned = await run_sized(2 * sum(map(len, bad_words)), lambda: _bad_words(bad_words, tokenizer))
    given = request.allowed_token_ids or ()
    allowed = await run_sized(len(given), lambda: tuple(dict.fromkeys(given)))
    num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    check_lists(allowed, banned, num_prompts * request.num_choices)
    return SamplingParams(
        temperature=otherwise.temperature if request.temperature is None else request.temperature,
        top_k=otherwise.top_k if request.top_k is None else max(request.top_k, 0),
        top_p=otherwise.top_p if request.top_p is None else request.top_p,
        min_p=otherwise.min_p if request.min_p is None else request.min_p,
        seed=request.seed,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or request.repeat_penalty or otherwise.repetition_penalty,
        logit_bias=tuple((request.logit_bias or {}).items()),
        allowed_token_ids=allowed or None,
        bad_words=banned,
    )


def _successor(seed: int | None, number: int) -> int | None:
    """Return `seed + number`, wrapped to signed 64 bits; None stays None."""
    return None if seed is None else (seed + number + 2**63) % 2**64 - 2**63


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Encode each word with and without a space before it: its tokens differ, and both forms are banned."""
    forms = (form for word in words for form in (word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))
