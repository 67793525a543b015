"""Writes the answer to a message in Anthropic's form, whole or streamed.
Never parses the model's text: a BlockReader does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.api.anthropic.conversation import as_chat, names_of
from serve_app.api.anthropic.frames import MessageFrames
from serve_app.api.anthropic.message import Json, block_json, message_json, stop_json, usage_json
from serve_app.api.anthropic.schema import MessagesRequest
from serve_app.api.generation.blocks import BlockReader
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.sealing import Seal, of_tenant
from serve_app.api.openai.forms import Answering, Form, ParsedRequest
from serve_app.api.openai.sse import Frames
from serve_app.api.requests.schema import ChatRequest, parse_request
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel


@dataclass(frozen=True, slots=True)
class MessageForm(Form):
    answering: Answering
    request: ChatRequest
    seal: Seal | None
    """Seals the thoughts if they are not to be shown."""

    def body(self, pieces: Sequence[Piece]) -> Json:
        reader, (piece,) = self._reader(), pieces
        reader.read(piece.text, last=True)
        answering = self.answering
        message = message_json(answering.request_id, answering.model.id, usage_json(answering.choices.usage))
        cut = len(reader.blocks) - 1 if piece.finish_reason == "length" else None
        content = {"content": [block_json(block, is_cut=block.index == cut, seal=self.seal) for block in reader.blocks]}
        return message | content | stop_json(piece, has_called=reader.has_called, fills_context=self._fills_context)

    def frames(self) -> Frames:
        answering = self.answering
        names = answering.request_id, answering.model.id, answering.header
        return MessageFrames(*names, answering.choices, self._reader(), self.seal, fills_context=self._fills_context)

    @property
    def _fills_context(self) -> bool:
        """Whether the prompt leaves less of the context than `max_tokens`."""
        left = self.answering.model.max_model_len - len(self.answering.choices.prompts[0].token_ids)
        return (self.request.max_tokens or 0) > left

    def _reader(self) -> BlockReader:
        return BlockReader(self.answering.reader(self.request))


def read_messages(
    body: bytes, tenant: str, *, tokenizer: Tokenizer, model: ServedModel, seal: Seal | None, drop_billing_header: bool
) -> ParsedRequest[ChatRequest]:
    """Read a body. `seal`: without one, thoughts that are not to be shown do not come back either."""
    given, seal = parse_request(MessagesRequest, body), of_tenant(seal, tenant)
    request = as_chat(given, tokenizer, model, seal, drop_billing_header=drop_billing_header)
    seals = seal if given.omits_thoughts else None
    return ParsedRequest(request, lambda answering: MessageForm(answering, request, seals), names_of(given, request))
