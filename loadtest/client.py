"""Owns a lean client of streaming chat completions. It timestamps the bytes that arrive and parses them afterwards.
Never runs in the process that measures the server: its own CPU time is counted separately and reported."""

from __future__ import annotations

import argparse
import asyncio
import bisect
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

READY, GO, ENDED = "ready\n", "go\n", "ended\n"
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_END_OF_HEAD = b"\r\n\r\n"


class BadAnswer(ValueError):
    """The server's bytes are not a valid answer to the request."""


@dataclass(frozen=True, slots=True)
class Load:
    """`waves` rounds of `streams` concurrent requests. A wave begins when the previous one has ended."""

    port: int
    streams: int
    tokens: int
    """Length of each answer."""
    waves: int
    seed: int
    host: str = "127.0.0.1"
    model: str = "fake"
    pause_ms: tuple[float, float] = (0.0, 0.0)
    """Bounds of the pause between two waves, drawn anew each time."""
    timeout_s: float = 60.0
    """A request whose answer has not ended by then has failed."""
    longest_s: float = 90.0
    """No further wave begins after this time: a server that does not keep up would take hours."""
    background_streams: int = 0
    """Further streams that run throughout the load; they are dropped when the last wave has ended."""
    background_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request. Times are seconds of this process's monotonic clock; each arrival is a read that
    completed a token."""

    wave: int
    sent: float
    arrivals: tuple[float, ...]
    num_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    answers: list[Answer]
    background_errors: list[str]
    cpu_s: float
    """CPU time of this process, from the first request to the end of the last answer."""

    @staticmethod
    def from_json(line: str) -> Outcome:
        fields = json.loads(line)
        return Outcome(**fields | {"answers": [Answer(**answer) for answer in fields["answers"]]})


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, kept open from request to request. It only stores what arrives and when."""

    def __init__(self) -> None:
        self.reads: list[tuple[float, bytes]] = []
        self._tail = b""
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent: neither side has closed the connection, nor said that it will."""
        return self._transport is not None and not self._transport.is_closing() and not _says_close(self.reads)

    async def exchange(self, request: bytes) -> None:
        """Send a request and wait for the end of its answer. Raises ConnectionError if the server closes first."""
        assert self._transport is not None
        self.reads, self._tail = [], b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.monotonic(), data))
        end = data if len(data) >= len(_END_OF_CHUNKS) else self._tail + data
        self._tail = end[-len(_END_OF_CHUNKS) :]
        if self._tail == _END_OF_CHUNKS or _is_whole_error(self.reads):
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(ConnectionError("the server closed the connection"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


def _says_close(reads: list[tuple[float, bytes]]) -> bool:
    """Whether the answer is the last one on its connection, as when HAProxy was reloaded meanwhile."""
    head = b"".join(data for _, data in reads).partition(_END_OF_HEAD)[0]
    return b"connection: close" in head.lower().split(b"\r\n")


def _is_whole_error(reads: list[tuple[float, bytes]]) -> bool:
    """Whether the answer is a complete refusal. An answer that begins with status 200 is a stream, not a refusal."""
    if reads[0][1].startswith(b"HTTP/1.1 200"):
        return False
    head, found, body = b"".join(data for _, data in reads).partition(_END_OF_HEAD)
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(found and lengths) and len(body) >= int(lengths[0].partition(b":")[2])


# --- reading, after the load ----------------------------------------------------------------------------------------


def read_answer(wave: int, sent: float, reads: list[tuple[float, bytes]], wanted: int, error: str | None) -> Answer:
    """Parse the reads. An answer that is not exactly what the request asked for carries an error."""
    arrivals: dict[float, None] = {}
    num_tokens = 0
    try:
        for stamp, count in token_stamps(reads):
            arrivals[stamp] = None
            num_tokens += count
    except ValueError as bad:  # malformed HTTP or JSON raises it, too
        error = error or str(bad)
    if error is None and num_tokens != wanted:
        error = f"{num_tokens} tokens instead of {wanted}"
    return Answer(wave, sent, tuple(arrivals), num_tokens, error)


def token_stamps(reads: list[tuple[float, bytes]]) -> Iterator[tuple[float, int]]:
    """Yield the time at which each event with text was complete, and its number of tokens.

    One character is one token: the engines that this client measures are scripted to answer so.

    Raises:
        BadAnswer: as `stamped_events`.
    """
    for stamp, event in stamped_events(reads):
        if count := _num_tokens(event):
            yield stamp, count


def stamped_events(reads: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, object]]]:
    """Yield each event of a stream, parsed, with the time at which its last byte arrived.

    Raises:
        BadAnswer: it is not a stream of events, it carries an error, or it has no end.
    """
    raw = b"".join(data for _, data in reads)
    ends = list(accumulate(len(data) for _, data in reads))
    event: dict[str, object] | str = ""
    for end, event in _events(raw):
        if isinstance(event, dict):
            if error := event.get("error"):
                raise BadAnswer(f"error in the stream: {str(error)[:200]}")
            yield reads[bisect.bisect_left(ends, end)][0], event
    if event != "[DONE]":
        raise BadAnswer(f"the stream ends with {str(event)[:100]!r}")


def _events(raw: bytes) -> Iterator[tuple[int, dict[str, object] | str]]:
    """Yield each server-sent event, parsed, with the number of bytes that had arrived when it was complete."""
    head, _, _ = raw.partition(_END_OF_HEAD)
    if not head.startswith(b"HTTP/1.1 200"):
        raise BadAnswer(f"no stream: {raw[:200]!r}")
    pending = b""
    for end, chunk in _chunks(raw, len(head) + len(_END_OF_HEAD)):
        *whole, pending = (pending + chunk).split(b"\n\n")
        for event in whole:
            if event.startswith(b":"):  # a comment, which keeps a silent stream open
                continue
            text = event.removeprefix(b"data: ").decode()
            yield end, text if text == "[DONE]" else json.loads(text)


def _chunks(raw: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the HTTP chunks from offset `at`: each one's end and its content."""
    while at < len(raw):
        line = raw.index(b"\r\n", at)
        begin = line + 2
        size = int(raw[at:line].partition(b";")[0], 16)
        yield begin + size, raw[begin : begin + size]
        at = begin + size + 2


def _num_tokens(event: dict[str, object]) -> int:
    match event:
        case {"choices": [{"delta": {"content": str(text)}}]}:
            return len(text)
    return 0


# --- the load -------------------------------------------------------------------------------------------------------


_Exchanged = tuple[int, float, list[tuple[float, bytes]], str | None]
"""A request that has ended: its wave, the time it was sent, the bytes that arrived, and its error."""


class _Client:
    """Connections of one load, and the requests on them."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._draw = random.Random(load.seed)
        self._connections: list[Connection] = []

    async def run(self) -> Outcome:
        load = self._load
        self._connections = [await self._connect() for _ in range(load.streams + load.background_streams)]
        _say(READY)
        await asyncio.to_thread(sys.stdin.readline)
        cpu = time.process_time()
        others = [asyncio.ensure_future(self._background(i)) for i in range(load.streams, len(self._connections))]
        asked: list[_Exchanged] = []
        last = time.monotonic() + load.longest_s
        for wave in range(load.waves):
            await asyncio.sleep(self._draw.uniform(*load.pause_ms) / 1000)
            if time.monotonic() < last:
                waiting = (self._ask(wave, i, load.tokens, load.timeout_s) for i in range(load.streams))
                asked += await asyncio.gather(*waiting)
        spent = time.process_time() - cpu
        _say(ENDED)
        errors = [other.result() or "" for other in others if other.done()]
        for connection in self._connections:
            connection.close()
        await asyncio.gather(*others)
        answers = [read_answer(wave, sent, reads, load.tokens, error) for wave, sent, reads, error in asked]
        return Outcome(answers, [error for error in errors if error], spent)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._load.host, self._load.port)
        return connection

    async def _ask(self, wave: int, i: int, tokens: int, timeout_s: float | None) -> _Exchanged:
        request = self._request(tokens)
        if not self._connections[i].is_open:
            self._connections[i].close()
            self._connections[i] = await self._connect()
        connection, sent, error = self._connections[i], time.monotonic(), None
        try:
            async with asyncio.timeout(timeout_s):
                await connection.exchange(request)
        except TimeoutError:
            error = f"no end within {timeout_s:g} s"
            connection.close()
        except ConnectionError as lost:
            error = str(lost)
        return wave, sent, connection.reads, error

    async def _background(self, i: int) -> str | None:
        wave, sent, reads, error = await self._ask(0, i, self._load.background_tokens, None)
        return read_answer(wave, sent, reads, self._load.background_tokens, error).error

    def _request(self, tokens: int) -> bytes:
        """Every prompt is new, so that no prefix cache holds it."""
        prompt = f"{self._draw.getrandbits(64):016x}"
        body: dict[str, object] = {
            "model": self._load.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return post(self._load.host, self._load.port, "/v1/chat/completions", body)


def post(host: str, port: int, path: str, body: dict[str, object]) -> bytes:
    """Encode an HTTP request."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _say(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def main() -> None:
    """Read a Load as a line of JSON, say READY when connected, begin at GO, say ENDED, print the Outcome as JSON."""
    fields = json.loads(sys.stdin.readline())
    fields["pause_ms"] = tuple(fields["pause_ms"])
    outcome = asyncio.run(_Client(Load(**fields)).run())
    print(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m loadtest.client",
        description="Run the clients that standard input describes. Other programs start this one.",
    ).parse_args()
    main()
