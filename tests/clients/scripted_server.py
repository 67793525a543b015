"""Owns a real port with the real ingress over a scripted model, and keeps each request that clients send to it.
Never starts Ray: all that clients see of the server is the ingress."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.build.engine import FAKE_IMAGES
from engine.checkpoints.prepare import prepare_model
from engine.config import DEFAULT_MODEL
from serve_app.api.generation.sealing import Seal
from serve_app.api.ingress import create_app
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.images.intake import ImageIntake
from serve_app.settings.images import ImageSettings
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store.memory import LocalMemory
from tests.clients.scripted_model import IMAGE, Part, ScriptedModel, use_template

MODEL = "qwen3-scripted"
CONTEXT = 131_072
KEY = base64.urlsafe_b64encode(bytes(32)).decode()
"""The key that seals thoughts, so that clients send them back."""
KEPT_HEADERS = ("content-type", "accept", "anthropic-version", "anthropic-beta", "openai-beta", "x-stainless-lang")
START_TIMEOUT_S = 30


@dataclass(slots=True)
class Recorded:
    """A request as it came, and how it was answered."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    ignored: str = ""
    error: str = ""


@dataclass(slots=True)
class Recorder:
    """Keeps what passes between clients and the app, and changes nothing."""

    app: ASGIApp
    requests: list[Recorded] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        record = Recorded(scope["method"], path, kept, None)
        self.requests.append(record)
        data = bytearray()

        async def kept_receive() -> Message:
            message = await receive()
            data.extend(message.get("body", b""))
            return message

        async def kept_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                told = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                record.ignored = told.get("x-chunkserve-ignored", "")
            elif record.status >= 400:
                record.error += message.get("body", b"").decode(errors="replace")
            await send(message)

        try:
            await self.app(scope, kept_receive, kept_send)
        finally:
            record.body = json.loads(data) if data else None


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    url: str
    model: ScriptedModel
    requests: list[Recorded]

    @property
    def refused(self) -> list[str]:
        """Describe each request that was not served in a line."""
        bad = [one for one in self.requests if one.status >= 400]
        return [f"{one.status} {one.method} {one.path}: {one.error[:500]}" for one in bad]


@cache
def tokenizer() -> Tokenizer:
    """Return the default model's tokenizer, whose vocabulary has ChatML's tokens, too."""
    return use_template(Tokenizer.from_dir(prepare_model(DEFAULT_MODEL)))


@cache
def served_model() -> ServedModel:
    """Return a model that takes images, each of which becomes one mark in the prompt."""
    (mark,) = tokenizer().encode(IMAGE, add_special_tokens=False)
    kind = replace(FAKE_IMAGES, token_id=mark, max_pixels=FAKE_IMAGES.min_pixels)
    return ServedModel(
        id=MODEL,
        max_model_len=CONTEXT,
        created=1_700_000_000,
        tool_parser="hermes",
        reasoning_parser="qwen3",
        images=ImageIntake(kind, ImageSettings()),
    )


@contextmanager
def scripted_server(part: Part) -> Iterator[ScriptedServer]:
    model = ScriptedModel(tokenizer(), part)
    recorder = Recorder(
        create_app(model, tokenizer(), served_model(), seal=Seal([KEY]), memory=LocalMemory(ResponsesStoreSettings()))
    )
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(recorder, log_level="error", access_log=False, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:  # a client that connects before the server has started waits in the listener's backlog
        yield ScriptedServer(f"http://127.0.0.1:{listener.getsockname()[1]}", model, recorder.requests)
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        listener.close()
