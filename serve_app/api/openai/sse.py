"""Sends the server-sent events of one response: their order, their framing, and the end of a stream that fails.
Never sends a header before the engine has accepted the request, so that a refusal is a real 4xx."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import ClassVar, Protocol

from starlette.types import Send

from serve_app.api.generation.completion import Piece
from serve_app.api.generation.logprobs import json_chars
from serve_app.api.http.asgi import ClientGone
from serve_app.api.http.json_text import written
from serve_app.api.http.offload import run_sized
from serve_app.api.openai.choices import Choices, Indexed
from serve_app.api.openai.response import Envelope, Json, usage_json
from serve_app.errors.api_error import ApiError, to_api_error

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect frames otherwise
]
# ASCII only: clients that split lines as Python's str.splitlines does would cut a frame at U+2028 or U+0085.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_MARK = f"text goes here {uuid.uuid4().hex}"


class Frames(Protocol):
    """Writes the bytes of one stream. Each method returns whole frames, or nothing."""

    end: ClassVar[bytes]
    """Sent last, also after a failure."""

    async def begin(self) -> None:
        """Prepare what precedes the first frame, in a thread if it is long."""
        return

    def opening(self, index: int) -> bytes:
        """Write what precedes the first frame of a choice; empty after that."""
        ...

    def unopened(self, index: int) -> Sequence[int]:
        """List the choices to open before this one."""
        ...

    def content(self, index: int, piece: Piece) -> bytes:
        """Write the frames of a piece; empty if it has nothing to show yet."""
        ...

    async def scored(self, index: int, piece: Piece) -> bytes:
        """Write the frames of a piece that shows its tokens: in a thread, if there are many log-probabilities."""
        return await run_sized(json_chars(piece.tokens or ()), lambda: self.content(index, piece))

    async def closing(self) -> bytes:
        """Write what follows all choices, if none has failed."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Write an error that occurs after the stream has begun."""
        ...


@dataclass(frozen=True, slots=True)
class UsageShown:
    """Where a stream shows the usage: in a chunk of its own at the end, and with `always` in every other one as
    well."""

    at_end: bool = False
    always: bool = False


async def send_stream(
    send: Send, choices: Choices, frames: Frames, named: Callable[[ApiError], ApiError] = lambda error: error
) -> None:
    """Send the whole response. Each frame waits until the server has taken the previous one. `named`: names an error's
    field as the body does.

    Raises:
        EngineError, ApiError: before anything was sent; the caller answers with a status.
        ClientGone: the connection is closed, and the request aborted.
    """
    async with aclosing(choices.pieces()) as pieces:
        first = await anext(pieces)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            await _send_answer(send, first, pieces, frames)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - to_api_error logs it; the client must see that the answer failed
            choices.error = named(to_api_error(error))
            await _send(send, frames.failure(choices.error))
        await send({"type": "http.response.body", "body": frames.end})


async def _send_answer(send: Send, first: Indexed, pieces: AsyncGenerator[Indexed, None], frames: Frames) -> None:
    await frames.begin()
    await _send_piece(send, *first, frames)
    async for index, piece in pieces:
        await _send_piece(send, index, piece, frames)
    if frame := await frames.closing():
        await _send(send, frame)


async def _send_piece(send: Send, index: int, piece: Piece, frames: Frames) -> None:
    """Send what precedes a piece's frame, and the frame if it shows anything: together, to fit one packet."""
    for one in frames.unopened(index):
        await _send(send, frames.opening(one))
    frame = frames.opening(index)
    if piece.tokens or piece.text or piece.finish_reason is not None:
        frame += frames.content(index, piece) if piece.tokens is None else await frames.scored(index, piece)
    if frame:
        await _send(send, frame)


class ChunkFrames(Frames):
    """Writes the chunks of chat and plain completions. Most chunks only carry text, so the JSON around the text is
    encoded once for each choice."""

    end: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, choices: Choices, envelope: Envelope, shown: UsageShown) -> None:
        self._choices = choices
        self._envelope = envelope
        self._shown = shown
        # As in OpenAI's schema: if usage was requested, it is null in every chunk but the last.
        self._blank: Json = {"usage": None} if shown.at_end else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, index: int) -> bytes:
        if index in self._around:
            return b""
        plain = self._encoded(index, Piece(_MARK)) if self._envelope.shape.is_plain else b""
        before, _, after = plain.partition(encode_basestring_ascii(_MARK).encode())
        self._around[index] = before, after
        chunk = self._envelope.opening(index, self._choices.prompts[index])
        if chunk is None:
            return b""
        return _frame(chunk | self._usage(opened=index))

    def unopened(self, index: int) -> Sequence[int]:
        if index in self._around or not self._envelope.shape.opens_in_order:
            return ()
        return [one for one in range(index) if one not in self._around]

    def content(self, index: int, piece: Piece) -> bytes:
        before, after = self._around[index]
        if not before or piece.finish_reason is not None or piece.tokens is not None or self._shown.always:
            return self._encoded(index, piece)
        return before + encode_basestring_ascii(piece.text).encode() + after

    async def closing(self) -> bytes:
        """Write the usage; empty if it was not requested."""
        if not self._shown.at_end:
            return b""
        return _frame(self._envelope.chunk([]) | {"usage": self._spent()})

    def failure(self, error: ApiError) -> bytes:
        return _frame(error.body())

    def _encoded(self, index: int, piece: Piece) -> bytes:
        chunk = self._envelope.delta(index, piece)
        return b"" if chunk is None else _frame(chunk | self._usage())

    def _usage(self, opened: int | None = None) -> Json:
        """Write the usage of what was shown: nothing of choices that are not open yet, nor of the one that the chunk
        opens."""
        if not self._shown.always:
            return self._blank
        hidden = [one for one in range(len(self._choices)) if one == opened or one not in self._around]
        return {"usage": self._spent(hidden)}

    def _spent(self, hidden: Collection[int] = ()) -> Json:
        """Count the usage. `hidden`: leave out the tokens of these choices."""
        return usage_json(self._choices.usage_without(hidden), self._choices.reasoning_tokens_without(hidden))


def _frame(payload: Json) -> bytes:
    return f"data: {written(payload, _encode)}\n\n".encode()


def event_frame(payload: Json) -> bytes:
    """Write a frame that also names its event, which is the payload's `type`."""
    return f"event: {payload['type']}\n".encode() + _frame(payload)


async def _send(send: Send, frame: bytes) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": True})
