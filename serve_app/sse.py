"""Owns the server-sent events of one answer: order, framing, and how a failure ends a stream that has begun.
Never sends a header before the engine has accepted the request, so that a refusal is a real 4xx."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Send

from serve_app.asgi import ClientGone
from serve_app.completion import Completion, Piece
from serve_app.errors import to_api_error
from serve_app.logprobs import json_chars
from serve_app.offload import run_sized
from serve_app.response import Envelope, Json, usage_json

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect frames otherwise
]
_DONE = b"data: [DONE]\n\n"
# ASCII only: clients that split lines as Python's str.splitlines does would cut a frame at U+2028 or U+0085.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


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
    if (opening := envelope.shape.opening()) is not None:
        await _send(send, _frame(envelope.chunk([opening]) | blank))
    await _send_piece(send, first, envelope, blank)
    async for piece in pieces:
        await _send_piece(send, piece, envelope, blank)
    if include_usage:
        await _send(send, _frame(envelope.chunk([]) | {"usage": usage_json(completion.usage)}))


async def _send_piece(send: Send, piece: Piece, envelope: Envelope, blank: Json) -> None:
    if piece.tokens:
        await _send(send, await run_sized(json_chars(piece.tokens), lambda: _piece_frame(piece, envelope, blank)))
    elif piece.text or piece.finish_reason is not None:
        await _send(send, _piece_frame(piece, envelope, blank))


def _piece_frame(piece: Piece, envelope: Envelope, blank: Json) -> bytes:
    return _frame(envelope.chunk([envelope.shape.delta(piece)]) | blank)


def _frame(payload: Json) -> bytes:
    return f"data: {_encode(payload)}\n\n".encode()


async def _send(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": True})
