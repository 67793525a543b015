"""Owns the way from a request to what the engine takes: encoding, the echo, checks that need the model's numbers.
Never blocks the event loop for long: long texts are encoded in a thread."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import SamplingParams, Submission
from serve_app.api.chat_template import TemplateFailed
from serve_app.api.detokenizer import Detokenizer
from serve_app.api.echo import Echo, read_prompt
from serve_app.api.offload import run_sized
from serve_app.api.schema import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, GenerationRequest
from serve_app.api.tokenizer import Tokenizer
from serve_app.engine_client import ServedModel
from serve_app.errors import ApiError, context_length_exceeded


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an answer starts from. The detokenizer has read the prompt if there is an echo."""

    submission: Submission
    detokenizer: Detokenizer
    echo: Echo | None = None


async def prepare_chat(request: ChatRequest, request_id: str, tokenizer: Tokenizer, model: ServedModel) -> Prepared:
    messages = [message.for_template() for message in request.messages]
    size = sum(len(text) for message in messages for text in message.values())
    try:
        prompt = await run_sized(size, lambda: tokenizer.encode_chat(messages))
    except TemplateFailed as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error
    wanted = request.max_completion_tokens or request.max_tokens
    allowed = _answer_tokens(prompt, wanted, None, model, "messages")
    return Prepared(Submission(request_id, tuple(prompt), _sampling(request, allowed)), tokenizer.detokenizer())


async def prepare_completion(
    request: CompletionRequest, request_id: str, tokenizer: Tokenizer, model: ServedModel
) -> Prepared:
    given = request.prompt
    if isinstance(given, str):
        prompt = await run_sized(len(given), lambda: tokenizer.encode(given))
    else:
        prompt = given
        _check_vocabulary(prompt, tokenizer.vocab_size)
    allowed = _answer_tokens(prompt, request.max_tokens, DEFAULT_COMPLETION_TOKENS, model, "prompt")
    sampling = _sampling(request, allowed, request.logprobs, request.logprobs if request.echo else None)
    submission = Submission(request_id, tuple(prompt), sampling)
    detokenizer = tokenizer.detokenizer()
    if not request.echo:
        return Prepared(submission, detokenizer)
    text = given if isinstance(given, str) else None
    echo = await run_sized(len(prompt), lambda: read_prompt(prompt, text, detokenizer, tokenizer.special_texts))
    return Prepared(submission, detokenizer, echo)


def _check_vocabulary(prompt: list[int], vocab_size: int) -> None:
    if (largest := max(prompt, default=0)) >= vocab_size:
        text = f"Token id {largest} is out of vocabulary: this model's ids are 0 to {vocab_size - 1}."
        raise ApiError(400, text, param="prompt", code="invalid_value")


def _answer_tokens(
    prompt: list[int], wanted: int | None, default: int | None, model: ServedModel, param: str
) -> int | None:
    """How many tokens the answer may have; None is as many as the context holds.

    Too many that were asked for are refused; a default is cut to what is left.
    """
    if not prompt:
        raise ApiError(400, "The prompt is empty.", param=param, code="empty_prompt")
    limit, left = model.max_model_len, model.max_model_len - len(prompt)
    head = f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(prompt)} tokens"
    if left < (0 if wanted == 0 else 1):
        tail = "." if wanted == 0 else ", and the answer needs one more."
        raise context_length_exceeded(f"{head}{tail}", param=param, limit=limit, n_prompt_tokens=len(prompt))
    if wanted is not None and wanted > left:
        text = f"{head} and {wanted} were requested for the answer; at most {left} are left for it."
        raise context_length_exceeded(text, param=param, limit=limit, n_prompt_tokens=len(prompt))
    return wanted if wanted is not None or default is None else min(default, left)


def _sampling(
    request: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """May raise RequestRejected: min_tokens above max_tokens."""
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
