"""Owns what the transport benchmark compares with: a streaming handle, Ray Serve LLM's batches, and no hop at all.
Never more than the path needs: each is a lower bound of what an LLM server that sends its tokens that way costs."""

# No `from __future__ import annotations` here: Ray reads the builder's annotation to validate `args:`.
import asyncio
import json
import random
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any

from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_ONGOING = 1000
_ALPHABET = "abcdefghijklmnopqrstuvwxyz "
Generate = Callable[[int], AsyncIterator[list[str]]]
"""The tokens of an answer of so many."""

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Settings(BaseModel):
    step_ms: float
    """Pace of the scripted engine: a token for every stream a step."""
    batch_ms: float = 0.0
    """Period in which tokens are collected, as Ray Serve LLM does; 0 sends each alone."""
    hop: bool = True
    """The engine is a replica of its own; without, it runs in the ingress replica: what HTTP through Serve costs."""


def build(args: Settings) -> Application:
    """The application of a config's `import_path: benchmarks.transport.apps:build`."""
    options = {"max_ongoing_requests": MAX_ONGOING, "ray_actor_options": {"num_cpus": 0.25}}
    engine = serve.deployment(name="Engine", **options)(ScriptedEngine)
    ingress = serve.deployment(name="Ingress", **options)(serve.ingress()(Ingress))
    return ingress.bind(engine.bind(args) if args.hop else args)


class ScriptedEngine:
    """Steps in a thread of its own while there are streams, like an engine; the tokens are random letters."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._streams: dict[int, asyncio.Queue[str]] = {}
        self._num_asked = 0
        self._work = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def generate(self, num_tokens: int) -> AsyncIterator[list[str]]:
        tokens = self._tokens(num_tokens)
        if not self._settings.batch_ms:
            async with aclosing(tokens):
                async for token in tokens:
                    yield [token]
            return
        async with aclosing(in_batches(tokens, self._settings.batch_ms / 1000)) as batches:
            async for batch in batches:
                yield batch

    async def _tokens(self, num_tokens: int) -> AsyncGenerator[str, None]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="engine-steps", daemon=True).start()
        self._num_asked = stream_id = self._num_asked + 1
        queue = self._streams[stream_id] = asyncio.Queue()
        self._work.set()
        try:
            for _ in range(num_tokens):
                yield await queue.get()
        finally:
            del self._streams[stream_id]

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            streams = list(self._streams)  # those that wait when a step begins get its tokens
            if not streams:
                self._work.wait()
                self._work.clear()
                continue
            time.sleep(self._settings.step_ms / 1000)
            try:
                loop.call_soon_threadsafe(self._deliver, streams)
            except RuntimeError:  # the loop is closed: the replica has ended in the middle of a step
                return

    def _deliver(self, streams: list[int]) -> None:
        for stream_id in streams:
            if queue := self._streams.get(stream_id):
                queue.put_nowait(random.choice(_ALPHABET))


async def in_batches(tokens: AsyncIterator[str], interval_s: float) -> AsyncGenerator[list[str], None]:
    """Everything that came within each interval. The rule of ray.llm 2.60 (_internal/serve/utils/batcher.py, Batcher,
    with RAYLLM_MODEL_RESPONSE_BATCH_TIMEOUT_MS at its 50): a fixed timer, from which the first token is not exempt."""
    pending: list[str] = []

    async def read() -> None:
        async for token in tokens:
            pending.append(token)

    reader = asyncio.ensure_future(read())
    try:
        while not reader.done():
            await asyncio.wait((reader,), timeout=interval_s)
            if batch := pending[:]:
                pending.clear()
                yield batch
        reader.result()
    finally:
        reader.cancel()


class Ingress:
    """Parses a chat request, asks the engine through a streaming handle, and frames what comes."""

    def __init__(self, engine: DeploymentHandle | Settings) -> None:
        """`engine`: where it is, or what one that runs here is to be like."""
        if isinstance(engine, Settings):
            self._generate: Generate = ScriptedEngine(engine).generate
        else:
            self._generate = engine.options(stream=True).generate.remote

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", health),
                Route("/v1/chat/completions", Chat(self._generate), methods=["POST"]),
            ]
        )


async def health(request: Request) -> Response:
    return Response()


class Chat:
    """An ASGI endpoint, so that no response object re-pipes the chunks."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads(await Request(scope, receive).body())
        before, after = _around_text(asked["model"])
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for tokens in self._generate(asked["max_tokens"]):
            frames = [before + encode_basestring_ascii(token).encode() + after for token in tokens]
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _around_text(model: str) -> tuple[bytes, bytes]:
    """A chunk, as the measured server sends it, up to and after its text: encoded once a stream."""
    mark = "text goes here"
    choice = {"index": 0, "delta": {"content": mark}, "logprobs": None, "finish_reason": None}
    chunk: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }
    text = json.dumps(chunk, separators=(",", ":"))
    before, after = text.split(json.dumps(mark))
    return f"data: {before}".encode(), f"{after}\n\n".encode()
