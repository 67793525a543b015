"""Owns the JSON of answers, for chat and for plain completions: whole bodies and the chunks of a stream.
Never decides what an answer says."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from engine.protocol import Usage
from serve_app.api.completion import Piece
from serve_app.api.logprobs import TokenText, logprobs_json
from serve_app.engine_client import ServedModel

Json = dict[str, Any]


class Shape(Protocol):
    """What differs between the two endpoints. A choice is an item of `choices`."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def choice(self, piece: Piece) -> Json: ...

    def opening(self) -> Json | None:
        """The choice of a stream's first chunk, sent before there is any text; None where there is no such chunk."""
        ...

    def delta(self, piece: Piece) -> Json:
        """The choice of a later chunk."""
        ...


class ChatShape:
    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def choice(self, piece: Piece) -> Json:
        return _choice("message", {"role": "assistant", "content": piece.text, "refusal": None}, piece)

    def opening(self) -> Json | None:
        return _choice("delta", {"role": "assistant", "content": ""}, Piece(""))

    def delta(self, piece: Piece) -> Json:
        return _choice("delta", {"content": piece.text} if piece.text else {}, piece)


class TextShape:
    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text

    def choice(self, piece: Piece) -> Json:
        logprobs = None if piece.tokens is None else logprobs_json(piece.tokens, self._token_text)
        return _choice("text", piece.text, piece, logprobs)

    def opening(self) -> Json | None:
        return None

    def delta(self, piece: Piece) -> Json:
        return self.choice(piece)


def _choice(key: str, value: Any, piece: Piece, logprobs: Json | None = None) -> Json:
    return {"index": 0, key: value, "logprobs": logprobs, "finish_reason": piece.finish_reason}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and chunk of one answer has in common."""

    id: str
    model: str
    shape: Shape
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, piece: Piece, usage: Usage) -> Json:
        return self._named(self.shape.object, [self.shape.choice(piece)]) | {"usage": usage_json(usage)}

    def chunk(self, choices: list[Json]) -> Json:
        return self._named(self.shape.chunk_object, choices)

    def _named(self, name: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_json(model: ServedModel) -> Json:
    """`max_model_len` is vLLM's addition, which clients read to size their prompts."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "max_model_len": model.max_model_len,
    }
