"""Owns streamed answers as a client on the network sees them, hundreds at a time: each frame, and how it ended.
Never retries and never hides a fault: a connection that breaks is recorded, and what came before it is kept."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 180
"""Longest life of a stream, which only a failure reaches."""
_GRACE_S = 5
_TICK_S = 0.02

Answer = tuple[str, str | None, int | None]
"""Text, finish reason, completion tokens."""


@dataclass(slots=True)
class Stream:
    """One streamed completion, as far as it has come."""

    status: int = 0
    text: str = ""
    num_frames: int = 0
    finish_reason: str | None = None
    completion_tokens: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    """Whether [DONE] came, and the response ended as HTTP says."""
    broken: str | None = None
    """How the connection failed."""
    longest_gap_s: float = 0.0
    """The longest time between two frames."""
    _last_frame: float | None = None

    @property
    def ended(self) -> bool:
        return self.done or self.broken is not None

    @property
    def answer(self) -> Answer:
        """Return what must be the same whatever happened on the way."""
        return self.text, self.finish_reason, self.completion_tokens

    @property
    def fault(self) -> str | None:
        """Return why this is not a whole answer; None if it is one."""
        if self.error is not None:
            return f"{self.status}: {self.error}"
        if self.broken is not None:
            return self.broken
        return None if self.done and self.finish_reason else "ended early"

    def take(self, payload: str) -> None:
        if payload == "[DONE]":
            self.done = True
            return
        frame, now = json.loads(payload), time.monotonic()
        if self._last_frame is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self._last_frame)
        self._last_frame = now
        self.num_frames += 1
        self.error = frame.get("error", self.error)
        for choice in frame.get("choices", ()):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if usage := frame.get("usage"):
            self.completion_tokens = usage["completion_tokens"]


def request_bytes(url: str, body: dict[str, Any]) -> bytes:
    """Return the request for a streamed completion as it goes over the wire."""
    data = json.dumps({"stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def connect(url: str, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port, **options)


async def read_stream(url: str, body: dict[str, Any], stream: Stream) -> None:
    """Ask, and follow the answer to its end into `stream`."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await connect(url)
            try:
                writer.write(request_bytes(url, body))
                await follow(reader, stream)
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError) as error:  # an IncompleteReadError is an EOFError
        stream.broken = repr(error)


async def follow(reader: asyncio.StreamReader, stream: Stream) -> None:
    """Read a response that is under way.

    Raises:
        EOFError, OSError: it broke off.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    stream.status = int(head.split()[1])
    if "transfer-encoding: chunked" not in head:
        text = (await reader.read()).decode()
        stream.error = json.loads(text)["error"] if text.startswith("{") else {"message": text}
        raise EOFError(f"answered {stream.status}")
    rest = ""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += (await reader.readexactly(size + 2))[:-2].decode()
        *frames, rest = rest.split("\n\n")
        for frame in frames:
            if frame.startswith(":"):  # a comment, which keeps a silent stream open
                continue
            stream.take(frame.removeprefix("data: "))


@dataclass(slots=True)
class Crowd:
    """Streams that run at the same time."""

    url: str
    bodies: Sequence[dict[str, Any]]
    streams: list[Stream] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self.streams = [Stream() for _ in self.bodies]
        pairs = zip(self.bodies, self.streams, strict=True)
        self._tasks = [asyncio.ensure_future(read_stream(self.url, body, stream)) for body, stream in pairs]

    async def until(self, what: Callable[[Stream], bool], timeout_s: float = 60) -> None:
        """Wait until `what` is true of each stream, or it has ended."""
        async with asyncio.timeout(timeout_s):
            while not all(stream.ended or what(stream) for stream in self.streams):
                await asyncio.sleep(_TICK_S)

    @property
    def num_live(self) -> int:
        return sum(not task.done() for task in self._tasks)

    @property
    def num_broken(self) -> int:
        return sum(stream.broken is not None for stream in self.streams)

    async def finish(self) -> list[Stream]:
        async with asyncio.timeout(TIMEOUT_S + _GRACE_S):
            await asyncio.gather(*self._tasks)
        return self.streams


def begun(stream: Stream) -> bool:
    return bool(stream.text)


async def read_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    crowd = Crowd(url, bodies)
    crowd.start()
    return await crowd.finish()
