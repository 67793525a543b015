"""Owns a client of streamed text completions for any OpenAI server, and the record of each answer.
Never parses while a load runs: it stores bytes with their times, and parses them afterwards."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from loadtest.client import Connection, post, stamped_events

HOST = "127.0.0.1"
TIMEOUT_S = 600.0


def completion_body(prompt: str, tokens: int) -> dict[str, Any]:
    """Return the body of a request for exactly this many tokens: greedy, streamed, with the server's own token
    counts."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. Times are seconds of this process's monotonic clock; each event with text is one arrival."""

    sent: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    """From the server's `usage`, since an event may carry several."""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first. Merging tokens into one event does not change it."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that has ended; its answer is not parsed yet."""

    sent: float
    reads: list[tuple[float, bytes]]
    wanted: int
    """Tokens that the request asked for."""
    error: str | None

    def read(self) -> Completion:
        """Parse the answer. One that is not exactly what the request asked for carries an error."""
        arrivals: list[float] = []
        usage: dict[str, int] = {}
        error = self.error
        try:
            for stamp, event in stamped_events(self.reads):
                arrivals += [stamp] if _has_text(event) else []
                usage = _usage_of(event) or usage
        except ValueError as bad:  # what is no HTTP, or no JSON, raises that too
            error = error or str(bad)
        counts = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        error = error or _incompleteness(arrivals, counts[1], self.wanted)
        return Completion(self.sent, tuple(arrivals), *counts, error)


def _has_text(event: dict[str, object]) -> bool:
    match event:
        case {"choices": [{"text": str(text)}]}:
            return bool(text)
    return False


def _usage_of(event: dict[str, object]) -> dict[str, int] | None:
    match event:
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(output)}}:
            return {"prompt_tokens": prompt, "completion_tokens": output}
    return None


def _incompleteness(arrivals: list[float], output_tokens: int, wanted: int) -> str | None:
    if output_tokens != wanted:
        return f"{output_tokens} tokens instead of {wanted}"
    return None if arrivals else "an answer without text"


class Client:
    """Sends requests to one server. Connections stay open between requests, until the `async with` block ends."""

    def __init__(self, port: int, model: str, timeout_s: float = TIMEOUT_S) -> None:
        self._port = port
        self._model = model
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def ask(self, prompt: str, tokens: int) -> Exchange:
        """Ask for exactly this many tokens, greedily. A failure is reported in the answer's `error`."""
        body = {"model": self._model, **completion_body(prompt, tokens)}
        request = post(HOST, self._port, "/v1/completions", body)
        sent, reads, error = time.monotonic(), list[tuple[float, bytes]](), None
        try:
            async with asyncio.timeout(self._timeout_s):
                reads = await self._exchange(request)
        except TimeoutError:
            error = f"no end within {self._timeout_s:g} s"
        except OSError as lost:
            error = str(lost)
        return Exchange(sent, reads, tokens, error)

    async def _exchange(self, request: bytes) -> list[tuple[float, bytes]]:
        if kept := self._kept():
            try:
                return await self._on(kept, request)
            except ConnectionError:
                # The server closed an idle connection, which it may at any time; it has not begun with this request.
                if kept.reads:
                    raise
        _, connection = await asyncio.get_running_loop().create_connection(Connection, HOST, self._port)
        return await self._on(connection, request)

    async def _on(self, connection: Connection, request: bytes) -> list[tuple[float, bytes]]:
        try:
            await connection.exchange(request)
        except BaseException:  # a timeout, too: a late answer must not be read as the next request's
            connection.close()
            raise
        self._idle.append(connection)
        return connection.reads

    def _kept(self) -> Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
            connection.close()
        return None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._idle:
            connection.close()
        await asyncio.sleep(0)  # a transport closes in the loop's next turn
