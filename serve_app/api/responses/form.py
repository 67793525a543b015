"""Owns how a Responses request is answered, whole or streamed.
Never reads the model's text; a reader of blocks does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.blocks import BlockReader
from serve_app.api.completion import Piece
from serve_app.api.forms import Answering, Asked, Form
from serve_app.api.responses.answer import Answer
from serve_app.api.responses.conversation import as_chat, names_of, with_strictness
from serve_app.api.responses.frames import ResponseFrames
from serve_app.api.responses.response import Json
from serve_app.api.responses.schema import ResponsesRequest
from serve_app.api.schema import ChatRequest, parse_request
from serve_app.api.scored_blocks import ScoredBlocks
from serve_app.api.sse import Frames
from serve_app.engine_client import ServedModel


@dataclass(frozen=True, slots=True)
class ResponseForm:
    answer: Answer
    blocks: BlockReader
    scored: ScoredBlocks

    def body(self, pieces: Sequence[Piece]) -> Json:
        (piece,) = pieces
        self.scored.read(piece)
        return self.answer.ended(self.blocks.blocks, cut_off=piece.finish_reason == "length")

    def frames(self) -> Frames:
        return ResponseFrames(self.answer, self.blocks, self.scored)


def read_response(body: bytes, *, model: ServedModel) -> Asked[ChatRequest]:
    given = with_strictness(parse_request(ResponsesRequest, body), model)
    request = as_chat(given)

    def form(answering: Answering) -> Form:
        blocks = BlockReader(answering.reader(request))
        return ResponseForm(Answer(given, answering), blocks, ScoredBlocks(blocks, answering.tokenizer))

    return Asked(request, form, names_of(given, request))
