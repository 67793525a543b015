"""Owns how a Responses request is answered, whole or streamed.
Never reads the model's text; a reader of blocks does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.generation.blocks import BlockReader
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.scored_blocks import ScoredBlocks
from serve_app.api.openai.forms import Answering, Asked, Form
from serve_app.api.openai.responses.answer import Answer
from serve_app.api.openai.responses.conversation import as_chat, names_of
from serve_app.api.openai.responses.frames import ResponseFrames
from serve_app.api.openai.responses.passing import pass_over_hints, with_effort
from serve_app.api.openai.responses.response import Json
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.openai.responses.sealing import Seal
from serve_app.api.openai.responses.toolbox import open_toolbox
from serve_app.api.openai.responses.turns import Turns
from serve_app.api.openai.sse import Frames
from serve_app.api.requests.schema import ChatRequest, parse_request
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel


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


def read_response(
    body: bytes, *, model: ServedModel, tokenizer: Tokenizer, seal: Seal | None = None
) -> Asked[ChatRequest]:
    """`seal`: without one, thoughts are not told sealed."""
    given = parse_request(ResponsesRequest, body)
    toolbox = open_toolbox(given.tools or (), model)
    seals = pass_over_hints(given, seal=seal if model.reasoning_parser else None)
    given, options = with_effort(given, tokenizer, model)
    turns = Turns(toolbox, seal)
    request = as_chat(given, toolbox, turns, options)

    def form(answering: Answering) -> Form:
        blocks = BlockReader(answering.reader(request))
        answer = Answer(given, toolbox, answering, seals)
        return ResponseForm(answer, blocks, ScoredBlocks(blocks, answering.tokenizer))

    return Asked(request, form, names_of(request, toolbox, turns))
