"""Owns many streamed completions at a time: the ids of their tokens, and when each came.
Never retries: a stream that ends before its reader leaves it is a fault."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
_TICK_S = 0.02


@dataclass(slots=True)
class Stream:
    """One answer, as far as it has come. Times are seconds of this process's monotonic clock."""

    request_id: str
    arrivals: list[float] = field(default_factory=list)
    """When each token came. Tokens of one event came together."""
    token_ids: list[int] = field(default_factory=list)
    is_complete: bool = False
    fault: str | None = None

    def take(self, payload: str, now: float) -> None:
        """Take one event's data."""
        if payload == "[DONE]":
            self.is_complete = True
            return
        event = json.loads(payload)
        if error := event.get("error"):
            self.fault = f"error in the stream: {str(error)[:200]}"
        for choice in event.get("choices", ()):
            found = choice.get("token_ids") or []
            self.token_ids += found
            self.arrivals += [now] * len(found)

    def resumed(self, at: float) -> float | None:
        """Return how many seconds after `at` the stream went on, for one that was interrupted then: the end of its
        longest pause that ended later. What its lost engine had sent before may have come a little after `at`."""
        pauses = [
            (after - before, after)
            for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)
            if after > at
        ]
        return max(pauses)[1] - at if pauses else None


class Streams:
    """Streams of one server, which begin together."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]], name: str) -> None:
        """name: of the run, for the requests' ids."""
        self.all = [Stream(f"{name}-{number}") for number in range(len(bodies))]
        self._tasks = [
            asyncio.ensure_future(_read(port, body, stream)) for body, stream in zip(bodies, self.all, strict=True)
        ]

    async def until(self, what: Callable[[Stream], bool], timeout_s: float) -> None:
        """Wait until `what` is true of each stream.

        Raises:
            RuntimeError: a stream has failed, or it took longer.
        """
        deadline = time.monotonic() + timeout_s
        while not all(what(stream) for stream in self.all):
            faults = [stream.fault for stream in self.all if stream.fault]
            waiting = sum(not what(stream) for stream in self.all)
            if faults or time.monotonic() > deadline:
                late = f"{waiting} streams are not there after {timeout_s:g} s"
                raise RuntimeError(faults[0] if faults else late)
            await asyncio.sleep(_TICK_S)

    async def leave(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _read(port: int, body: dict[str, Any], stream: Stream) -> None:
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(_request(port, body, stream.request_id))
            await _follow(reader, stream)
        finally:
            writer.close()
    except (OSError, EOFError, ValueError) as error:
        stream.fault = stream.fault or repr(error)
    if not stream.is_complete:
        stream.fault = stream.fault or "the stream has no end"


def _request(port: int, body: dict[str, Any], request_id: str) -> bytes:
    data = json.dumps({"stream": True, "return_token_ids": True, **body}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {HOST}:{port}",
        f"X-Request-Id: {request_id}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(data)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + data


async def _follow(reader: asyncio.StreamReader, stream: Stream) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if head.split()[1] != "200" or "transfer-encoding: chunked" not in head:
        raise ValueError(f"no stream: {head.splitlines()[0]}")
    rest = ""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += (await reader.readexactly(size + 2))[:-2].decode()
        now = time.monotonic()
        *events, rest = rest.split("\n\n")
        for event in events:
            if event.startswith("data: "):  # and not a comment, which keeps a silent stream open
                stream.take(event.removeprefix("data: "), now)
