"""Owns the server-sent events of one answer: order, framing, and how a failure ends a stream that has begun.
Never sends a header before the engine has accepted the request, so that a refusal is a real 4xx."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii

from starlette.types import Send

from serve_app.api.asgi import ClientGone
from serve_app.api.completion import Completion, Piece
from serve_app.api.logprobs import json_chars
from serve_app.api.offload import run_sized
from serve_app.api.response import Envelope, Json, usage_json
from serve_app.errors import to_api_error

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect frames otherwise
]
_DONE = b"data: [DONE]\n\n"
# ASCII only: clients that split lines as Python's str.splitlines does would cut a frame at U+2028 or U+0085.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_MARK = f"text goes here {uuid.uuid4().hex}"


async def send_stream(send: Send, completion: Completion, envelope: Envelope, include_usage: bool) -> None:
    """Send the whole response. Each frame waits for the server to take the one before.

    Raises:
        EngineError, ApiError: nothing was sent; the caller answers with a status.
        ClientGone: the connection is closed, and the request aborted.
    """
    async with aclosing(completion.pieces()) as pieces:
        first = await anext(pieces)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            await _send_answer(send, first, pieces, completion, envelope, include_usage)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - to_api_error logs it; the client must learn that this is no end
            await _send(send, _frame(to_api_error(error).body()))
        await send({"type": "http.response.body", "body": _DONE})


async def _send_answer(
    send: Send,
    first: Piece,
    pieces: AsyncGenerator[Piece, None],
    completion: Completion,
    envelope: Envelope,
    include_usage: bool,
) -> None:
    # OpenAI's schema: where usage was asked for, it is null on every chunk but the last.
    blank: Json = {"usage": None} if include_usage else {}
    frames = _PieceFrames(envelope, blank)
    opening = envelope.shape.opening()
    before = b"" if opening is None else _frame(envelope.chunk([opening]) | blank)
    await _send_piece(send, first, frames, before)
    async for piece in pieces:
        await _send_piece(send, piece, frames)
    if include_usage:
        await _send(send, _frame(envelope.chunk([]) | {"usage": usage_json(completion.usage)}))


async def _send_piece(send: Send, piece: Piece, frames: _PieceFrames, before: bytes = b"") -> None:
    """Send a piece's frame, if it says anything, and what is to go before it: all at once, for one packet."""
    if piece.tokens:
        await _send(send, before + await run_sized(json_chars(piece.tokens), lambda: frames.of(piece)))
    elif piece.text or piece.finish_reason is not None:
        await _send(send, before + frames.of(piece))
    elif before:
        await _send(send, before)


class _PieceFrames:
    """The frames of one stream's pieces. Most carry text and nothing else: what is around it is encoded once."""

    def __init__(self, envelope: Envelope, blank: Json) -> None:
        self._envelope = envelope
        self._blank = blank
        self._before, self._after = self._encoded(Piece(_MARK)).split(encode_basestring_ascii(_MARK).encode())

    def of(self, piece: Piece) -> bytes:
        if piece.finish_reason is not None or piece.tokens is not None:
            return self._encoded(piece)
        return self._before + encode_basestring_ascii(piece.text).encode() + self._after

    def _encoded(self, piece: Piece) -> bytes:
        return _frame(self._envelope.chunk([self._envelope.shape.delta(piece)]) | self._blank)


def _frame(payload: Json) -> bytes:
    return f"data: {_encode(payload)}\n\n".encode()


async def _send(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": True})
