"""Turns the pieces of answers into the library's answers and chunks.
Never reads a model's marks itself: the server's parsers do."""

from __future__ import annotations

from collections.abc import Sequence

from chunkserve.answers import Alternative, Answer, Choice, Chunk, FinishReason, TokenLogprob, ToolCallDelta
from engine.protocol import TokenLogprobs
from serve_app.api.generation.chat_reader import ChatReader, make_reader, needs_reader, prompt_end
from serve_app.api.generation.completion import Piece
from serve_app.api.openai.choices import Choices
from serve_app.api.requests.schema import ChatRequest, CompletionRequest
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.parsing.deltas import Arguments, CallStart, collect


class Reading:
    """Reads the answer to one request."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, choices: Choices, tokenizer: Tokenizer, model: ServedModel
    ) -> None:
        self._request = request
        self._choices = choices
        self._tokenizer = tokenizer
        self._model = model
        self._readers: dict[int, ChatReader] = {}
        self._num_open = len(choices)

    def answer(self, pieces: Sequence[Piece]) -> Answer:
        """Make the whole answer. `pieces`: each choice as one piece."""
        prompt = self._choices.prompts[0]
        scores = None
        if self._request.num_prompt_logprobs is not None:
            scores = (None, *(self._scored(one) for one in prompt.scores or ()))
        return Answer(
            tuple(self._choice(index, piece) for index, piece in enumerate(pieces)),
            self._choices.usage,
            tuple(prompt.token_ids),
            scores,
        )

    def _choice(self, index: int, piece: Piece) -> Choice:
        chunk, deltas = self._read(index, piece)
        assert chunk.finish_reason is not None, "the piece is whole"
        return Choice(
            chunk.text,
            chunk.token_ids,
            chunk.finish_reason,
            chunk.stop,
            chunk.reasoning,
            collect(deltas).calls,
            chunk.logprobs,
        )

    def chunk(self, index: int, piece: Piece) -> Chunk | None:
        """Make the next chunk of a stream; None if there is nothing to show yet."""
        chunk, deltas = self._read(index, piece)
        shown = chunk.text or chunk.token_ids or chunk.reasoning or deltas or chunk.finish_reason is not None
        return chunk if shown else None

    def _read(self, index: int, piece: Piece) -> tuple[Chunk, Sequence[CallStart | Arguments]]:
        reasoning, text, calls = "", piece.text, tuple[CallStart | Arguments, ...]()
        reason: FinishReason | None = piece.finish_reason
        if isinstance(self._request, ChatRequest) and needs_reader(self._request, self._model):
            reader = self._reader(index, self._request)
            read = reader.read(piece.text, last=reason is not None)
            reasoning, text, calls = read.reasoning, read.content, read.calls
            if reason == "stop" and reader.has_called and not self._request.names_function:
                reason = "tool_calls"
        own = [token for token in piece.tokens or () if not token.of_prompt]
        logprobs = None
        if self._request.num_logprobs is not None:
            logprobs = tuple(self._scored(token.scores) for token in own if token.scores is not None)
        self._num_open -= reason is not None
        chunk = Chunk(
            text,
            index,
            tuple(token.token_id for token in own),
            reasoning,
            tuple(map(_delta, calls)),
            logprobs,
            reason,
            piece.matched_stop,
            self._choices.usage if reason is not None and not self._num_open else None,
        )
        return chunk, calls

    def _reader(self, index: int, request: ChatRequest) -> ChatReader:
        if index not in self._readers:
            end = prompt_end(self._tokenizer, self._choices.prompts[0].token_ids)
            self._readers[index] = make_reader(request, self._model, end)
        return self._readers[index]

    def _scored(self, scores: TokenLogprobs) -> TokenLogprob:
        top = tuple(Alternative(token_id, self._text(token_id), logprob) for token_id, logprob in scores.top)
        return TokenLogprob(scores.token_id, self._text(scores.token_id), scores.logprob, top, scores.rank)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


def _delta(part: CallStart | Arguments) -> ToolCallDelta:
    if isinstance(part, CallStart):
        return ToolCallDelta(part.index, part.id, part.name)
    return ToolCallDelta(part.index, arguments=part.text)
