"""Owns the applications that the transport benchmark compares with: a streaming handle, Ray Serve LLM's batches, and no
hop at all. Never more than the path needs: each is a lower bound for an LLM server that sends its tokens that way."""

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
"""Generates an answer with the given number of tokens."""

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Settings(BaseModel):
    step_ms: float
    """Length of the scripted engine's steps; each step gives every stream a token."""
    batch_ms: float = 0.0
    """Period for which tokens are collected, as Ray Serve LLM does; 0 sends each token alone."""
    hop: bool = True
    """Whether the engine is a separate replica. If not, it runs in the ingress replica, which shows the cost of HTTP
    through Serve."""


def build(args: Settings) -> Application:
    """Build the application of a config with `import_path: benchmarks.transport.apps:build`."""
    options = {"max_ongoing_requests": MAX_ONGOING, "ray_actor_options": {"num_cpus": 0.25}}
    engine = serve.deployment(name="Engine", **options)(ScriptedEngine)
    ingress = serve.deployment(name="Ingress", **options)(serve.ingress()(Ingress))
    return ingress.bind(engine.bind(args) if args.hop else args)


class ScriptedEngine:
    """Steps in its own thread while there are streams, like an engine. The tokens are random letters."""

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
            streams = list(self._streams)  # the streams that are present when a step begins get its tokens
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
    """Yield the tokens of each interval together. This is the rule of ray.llm 2.60 (_internal/serve/utils/batcher.py,
    Batcher, with RAYLLM_MODEL_RESPONSE_BATCH_TIMEOUT_MS at its 50): a fixed timer, which also delays the first
    token."""
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
    """Parses a chat request, calls the engine through a streaming handle, and frames its tokens."""

    def __init__(self, engine: DeploymentHandle | Settings) -> None:
        """`engine` is a handle to the engine, or the settings of one to run here."""
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
    """An ASGI endpoint, so that no response object has to forward the chunks."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads(await Request(scope, receive).body())
        before, after = _around_text(body["model"])
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for tokens in self._generate(body["max_tokens"]):
            frames = [before + encode_basestring_ascii(token).encode() + after for token in tokens]
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _around_text(model: str) -> tuple[bytes, bytes]:
    """Return a chunk before and after its text, as the measured server sends it. It is encoded once for each stream."""
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
