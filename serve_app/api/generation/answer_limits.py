"""Owns the limits on what all answers of a request bring together, each of which has a copy of its own: of the prompt
with its images, of lists of tokens, and of the prompt's log-probabilities.
Never limits what the model or the schemas do, for one answer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.multimodal_inputs import SpanInput
from serve_app.api.requests.schema import ChatRequest, CompletionRequest
from serve_app.errors.api_error import ApiError

MAX_PROMPT_SCORES = 2**18
"""A prompt's log-probabilities reach the ingress in one frame, and decoding it holds the interpreter lock
throughout."""
MAX_RESPONSE_SCORES = 2**20
"""Each answer repeats those of its prompt: so many are 75 MB of JSON, and take half a gigabyte while it is written."""
MAX_COPIED_BYTES = 2**28
"""The most bytes of a prompt with its images and grammar, over all of its answers: each answer takes a copy to an
engine."""
_TOKEN_BYTES = 5
"""The most that a token id takes on its way."""
MAX_LISTED_TOKENS = 2**20
"""Each answer goes to an engine with lists of its own, which are checked there and looked at in its steps."""


def check_scores(num_tokens: int, num_all: int, request: ChatRequest | CompletionRequest) -> None:
    """`num_tokens`: a prompt's. `num_all`: those of the request's prompts up to this one.

    Raises:
        ApiError: there are more log-probabilities of prompts than a response may have.
    """
    alternatives = request.num_prompt_logprobs
    if alternatives is None:
        return
    counted = f"{num_tokens} prompt tokens with {alternatives} alternatives each"
    num_scores, most = num_tokens * (1 + alternatives), MAX_PROMPT_SCORES
    if num_scores <= most:
        counted = f"{num_all} prompt tokens with {alternatives} alternatives each, in {request.num_choices} answers,"
        num_scores, most = num_all * (1 + alternatives) * request.num_choices, MAX_RESPONSE_SCORES
    if num_scores <= most:
        return
    param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    text = f"{param}: {counted} have {num_scores} log-probabilities, and at most {most} are returned."
    raise ApiError(400, text, param=param, code="invalid_value")


def check_copies(num_tokens: int, inputs: Sequence[SpanInput], grammar: str | None, num_answers: int) -> None:
    """Raises:
    ApiError: there are more answers than the prompt's size allows. A single one is always allowed.
    """
    size = _TOKEN_BYTES * num_tokens + sum(len(given.data) for given in inputs) + len(grammar or "")
    if num_answers > 1 and size * num_answers > MAX_COPIED_BYTES:
        text = f"{num_answers} answers to a prompt that takes {size} bytes, with its images and grammar,"
        text = f"n: {text} take {size * num_answers} bytes to the engines, and at most {MAX_COPIED_BYTES} are taken."
        raise ApiError(400, text, param="n", code="invalid_value")


def check_lists(allowed: Sequence[int], banned: Sequence[Sequence[int]], num_answers: int) -> None:
    """Raises:
    ApiError: all answers together have more allowed tokens, or tokens of bad words, than engines should look at.
    """
    for param, num_tokens in (("allowed_token_ids", len(allowed)), ("bad_words", sum(map(len, banned)))):
        if (total := num_tokens * num_answers) > MAX_LISTED_TOKENS:
            text = f"{num_tokens} tokens for each of {num_answers} answers are {total}, and at most {MAX_LISTED_TOKENS}"
            raise ApiError(400, f"{param}: {text} are taken.", param=param, code="invalid_value")
