"""Owns a small server of streamed completions with scripted timings, in a test's process or in one of its own.
Never counts real tokens: each token is one word, and as many are sent as were asked for."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LONG = 100
"""The number of words from which a prompt is a long one."""


class FakeServer:
    """Sends each token `step_s` after the last. A long prompt takes `long_s`, in which all other streams wait."""

    def __init__(
        self,
        step_s: float = 0.0,
        long_s: float = 0.0,
        tokens_an_event: int = 1,
        lose: int = 0,
        *,
        says_close: bool = False,
        drops_every: int = 0,
    ) -> None:
        """`lose`: how many tokens are left out of each answer, in text and usage. `says_close`: each connection is
        closed after an answer, whose head says so. `drops_every`: a connection is closed without a word when it gets
        its request of this number, of which no byte is answered."""
        self.bodies: list[dict[str, Any]] = []
        self.in_hand = 0
        self.most_in_hand = 0
        self.num_connections = 0
        self._step_s, self._long_s = step_s, long_s
        self._tokens_an_event, self._lose = tokens_an_event, lose
        self._says_close, self._drops_every = says_close, drops_every
        self._may_step = asyncio.Event()
        self._may_step.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        num_asked = 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(_whole(self._load() if head.startswith(b"GET /load ") else {"data": [{"id": "fake"}]}))
                    continue
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                num_asked += 1
                if num_asked == self._drops_every:
                    return
                await self._answer(body, writer)
                if self._says_close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.in_hand += 1
        self.most_in_hand = max(self.most_in_hand, self.in_hand)
        try:
            await self._stream(body, writer)
        finally:
            self.in_hand -= 1

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if self._says_close else HEAD)
        words = sum(len(text.split()) for text in _texts_of(body))
        if words >= LONG:
            self._may_step.clear()
            await asyncio.sleep(self._long_s)
            self._may_step.set()
        tokens = body["max_tokens"] - self._lose
        for first in range(0, tokens, self._tokens_an_event):
            await asyncio.sleep(self._step_s)
            await self._may_step.wait()
            if writer.is_closing():  # the client has left
                return
            text = "word " * min(self._tokens_an_event, tokens - first)
            said = {"delta": {"content": text}} if "messages" in body else {"text": text}
            writer.write(_event({"choices": [{"index": 0, **said}]}))
        usage = {"prompt_tokens": words, "completion_tokens": tokens, "total_tokens": words + tokens}
        writer.write(_event({"choices": [], "usage": usage}) + _event("[DONE]") + b"0\r\n\r\n")

    def _load(self) -> dict[str, Any]:
        engine = {"num_running": self.in_hand, "num_waiting": 0, "num_held_blocks": self.in_hand}
        return {"engines": [engine], "ingress": {"num_live": self.in_hand}}


def _texts_of(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]] if "messages" in body else [body["prompt"]]


def _event(payload: object) -> bytes:
    data = f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _whole(payload: object) -> bytes:
    data = json.dumps(payload).encode()
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\nconnection: keep-alive\r\n\r\n".encode() + data


@asynccontextmanager
async def listening(server: FakeServer) -> AsyncIterator[int]:
    """Listen while the block runs; yield the port."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield int(listener.sockets[0].getsockname()[1])
    finally:
        listener.close()


async def _main(port: int, lose: int) -> None:
    server = FakeServer(step_s=0.001, lose=lose)
    await (await asyncio.start_server(server.serve, "127.0.0.1", port)).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve streamed completions with scripted timings.")
    for each in ("port", "lose"):
        parser.add_argument(each, type=int)
    given = parser.parse_args()
    asyncio.run(_main(given.port, given.lose))
