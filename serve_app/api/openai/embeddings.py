"""Prepares the prompts that an engine pools to embeddings, and writes the answer with the vectors.
Never judges a model: whoever sets `pooling` decides whether its vectors mean anything."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import SamplingParams, Submission
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.constraint import Patiently
from serve_app.api.generation.submission import (
    Prepared,
    answer_tokens,
    encode_prompt,
    prompt_too_long,
    text_chars,
    truncated,
)
from serve_app.api.http.offload import INLINE_SIZE
from serve_app.api.openai.choices import Choices
from serve_app.api.openai.forms import Answering, Form, ParsedRequest
from serve_app.api.openai.response import Json
from serve_app.api.openai.sse import Frames
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import parse_request
from serve_app.api.text.tokenizer import Tokenizer, TooManyTokens
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError

_INPUT_SIZE = 64
"""The cost of preparing an input without tokens, as a number of characters that would cost as much to encode."""


def read_embeddings(body: bytes) -> ParsedRequest[EmbeddingRequest]:
    request = parse_request(EmbeddingRequest, body)

    def form(answering: Answering) -> EmbeddingForm:
        return EmbeddingForm(answering.model.id, answering.choices, as_base64=request.encoding_format == "base64")

    return ParsedRequest(request, form)


async def prepare_embeddings(
    request: EmbeddingRequest, request_id: str, tokenizer: Tokenizer, model: ServedModel, _patiently: Patiently
) -> list[list[Prepared]]:
    """Prepare each input as a prompt of its own.

    Raises:
        ApiError: the model makes no embeddings, or an input does not fit.
    """
    if model.pooling is None:
        text = f"The model `{model.id}` makes no embeddings: the server's setting `pooling` is none."
        raise ApiError(400, text, param="model", code="unsupported_parameter")
    most = None if request.truncate_prompt_tokens is not None else model.max_model_len
    inputs = request.inputs
    groups, num_chars, unyielded = list[list[Prepared]](), text_chars(inputs), 0
    for number, given in enumerate(inputs):
        param = "input" if len(inputs) == 1 else f"input.{number}"
        try:
            tokens, _ = await encode_prompt(given, tokenizer, param, most, num_chars)
        except TooManyTokens as error:
            raise prompt_too_long(error, model, 0, param) from error
        kept = truncated(tokens, request.truncate_prompt_tokens, model.max_model_len, 0)
        answer_tokens(kept, 0, None, model, param)
        submission = Submission(
            request_id if number == 0 else f"{request_id}-{number}",
            tuple(kept),
            SamplingParams(max_tokens=0),
            priority=request.priority or 0,
            pooling=model.pooling,
            adapter=model.adapter,
        )
        groups.append([Prepared(submission, tokenizer.detokenizer())])
        unyielded += _INPUT_SIZE + len(tokens)
        if unyielded > INLINE_SIZE:
            await asyncio.sleep(0)  # there may be two thousand inputs
            unyielded = 0
    return groups


@dataclass(frozen=True, slots=True)
class EmbeddingForm(Form):
    """Answers with OpenAI's list of embeddings, each of length 1."""

    model_id: str
    choices: Choices
    as_base64: bool

    def body(self, pieces: Sequence[Piece]) -> Json:
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(normalized(vector))}
            for index, vector in enumerate(self.choices.vectors)
        ]
        usage = self.choices.usage
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": data, "model": self.model_id, "usage": counts}

    def _written(self, vector: list[float]) -> array[float] | str:
        if not self.as_base64:
            return array("d", vector)  # a quarter of a list's memory
        numbers = array("f", vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()

    def frames(self) -> Frames:
        raise AssertionError("an embedding is not streamed")


def normalized(vector: Sequence[float]) -> list[float]:
    """Scale a vector to length 1; the zero vector stays."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [value / length for value in vector] if length else list(vector)
