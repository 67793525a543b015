"""Owns the server-sent events of one response: order, framing, and how a failure ends a stream that has begun.
Never sends a header before the engine has accepted the request, so that a refusal is a real 4xx."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii

from starlette.types import Send

from serve_app.api.asgi import ClientGone
from serve_app.api.choices import Choices, Indexed
from serve_app.api.completion import Piece
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


@dataclass(frozen=True, slots=True)
class UsageShown:
    """Where a stream tells the usage: in a chunk of its own at the end, and, `always`, in every other as well."""

    at_end: bool = False
    always: bool = False


async def send_stream(send: Send, choices: Choices, envelope: Envelope, shown: UsageShown) -> None:
    """Send the whole response. Each frame waits for the server to take the one before.

    Raises:
        EngineError, ApiError: nothing was sent; the caller answers with a status.
        ClientGone: the connection is closed, and the request aborted.
    """
    async with aclosing(choices.pieces()) as pieces:
        first = await anext(pieces)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            await _send_answer(send, first, pieces, _Frames(choices, envelope, shown))
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - to_api_error logs it; the client must learn that this is no end
            await _send(send, _frame(to_api_error(error).body()))
        await send({"type": "http.response.body", "body": _DONE})


async def _send_answer(send: Send, first: Indexed, pieces: AsyncGenerator[Indexed, None], frames: _Frames) -> None:
    await _send_piece(send, *first, frames)
    async for index, piece in pieces:
        await _send_piece(send, index, piece, frames)
    if frame := frames.usage():
        await _send(send, frame)


async def _send_piece(send: Send, index: int, piece: Piece, frames: _Frames) -> None:
    """Send a piece's frame, if it says anything, and what is to go before it: all at once, for one packet."""
    before = frames.opening(index)
    if piece.tokens:
        await _send(send, before + await run_sized(json_chars(piece.tokens), lambda: frames.of(index, piece)))
    elif piece.text or piece.finish_reason is not None:
        await _send(send, before + frames.of(index, piece))
    elif before:
        await _send(send, before)


class _Frames:
    """The frames of one stream. Most carry text and nothing else: what is around it is encoded once for each choice."""

    def __init__(self, choices: Choices, envelope: Envelope, shown: UsageShown) -> None:
        self._choices = choices
        self._envelope = envelope
        self._shown = shown
        # OpenAI's schema: where usage was asked for, it is null on every chunk but the last.
        self._blank: Json = {"usage": None} if shown.at_end else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, index: int) -> bytes:
        """What goes before the first frame of a choice; empty for the others."""
        if index in self._around:
            return b""
        before, after = self._encoded(index, Piece(_MARK)).split(encode_basestring_ascii(_MARK).encode())
        self._around[index] = before, after
        chunk = self._envelope.opening(index, self._choices.prompts[index])
        return b"" if chunk is None else _frame(chunk | self._usage())

    def of(self, index: int, piece: Piece) -> bytes:
        if piece.finish_reason is not None or piece.tokens is not None or self._shown.always:
            return self._encoded(index, piece)
        before, after = self._around[index]
        return before + encode_basestring_ascii(piece.text).encode() + after

    def usage(self) -> bytes:
        """What goes after all choices; empty where nobody asked."""
        if not self._shown.at_end:
            return b""
        return _frame(self._envelope.chunk([]) | {"usage": usage_json(self._choices.usage)})

    def _encoded(self, index: int, piece: Piece) -> bytes:
        return _frame(self._envelope.delta(index, piece) | self._usage())

    def _usage(self) -> Json:
        return {"usage": usage_json(self._choices.usage)} if self._shown.always else self._blank


def _frame(payload: Json) -> bytes:
    return f"data: {_encode(payload)}\n\n".encode()


async def _send(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": True})
