"""Owns the two deployments: what an engine replica and an ingress replica do in a Ray Serve process.
Never parses HTTP and never schedules tokens; it joins the parts that do to Serve's lifecycle."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.build import build_engine
from engine.config import EngineConfig, ResolvedConfig
from engine.prepare import prepare_model
from engine.protocol import EngineError, Event, LoadSnapshot, Submission
from serve_app.engine_client import ServedModel
from serve_app.handle_client import HandleClient
from serve_app.ingress import create_app
from serve_app.settings import AppSettings
from serve_app.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def share_threads(engine: EngineConfig, engine_replicas: int) -> EngineConfig:
    """Give each engine its share of the cores this process may use, unless the config says how many it gets:
    replicas that each start a thread per core would fight over them."""
    if engine.num_threads is not None:
        return engine
    cores = len(os.sched_getaffinity(0))
    return dataclasses.replace(engine, num_threads=max(1, cores // engine_replicas))


def log_as_serve_does() -> None:
    """Send our loggers where Serve's own goes (file, console, format, level): without that, INFO is lost in a replica,
    and with it what the engine resolved and why."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("engine", "serve_app"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = serve_logger.handlers, False
        ours.setLevel(serve_logger.level)


class EngineReplica:
    """One engine in a process of its own. Token ids in, token ids out."""

    def __init__(self, settings: AppSettings) -> None:
        log_as_serve_does()
        self._engine = build_engine(settings.model, share_threads(settings.engine, settings.engine_replicas))
        # What lives as long as the process is not searched again: full collections paused steps for 20 to 30 ms.
        gc.collect()
        gc.freeze()

    async def stream(self, submission: Submission) -> AsyncGenerator[list[Event] | EngineError, None]:
        """Yield event batches: the first at once, then all that is queued, so that a busy hop costs one item for
        many tokens. A refusal is yielded, not raised: Serve would log a traceback for each."""
        try:
            async with aclosing(self._engine.stream(submission)) as stream:
                async for events in stream:
                    yield events
        except EngineError as error:
            yield error

    async def resolved_config(self) -> ResolvedConfig:
        return self._engine.config

    async def load(self) -> LoadSnapshot:
        return self._engine.load()

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises."""
        await self._engine.check_health()

    def __del__(self) -> None:
        """Serve calls this when the replica stops. The constructor may have failed before there was an engine."""
        if engine := getattr(self, "_engine", None):
            engine.shutdown()


class IngressReplica:
    """The HTTP side: an ASGI app of its own in each replica."""

    async def __init__(self, settings: AppSettings, engine: DeploymentHandle) -> None:  # type: ignore[misc]
        log_as_serve_does()
        self._settings = settings
        self._client = HandleClient(engine)
        self._tokenizer, created = await asyncio.to_thread(_load_tokenizer, settings)
        resolved: ResolvedConfig = await engine.resolved_config.remote()
        self._model = ServedModel(id=settings.model_id, max_model_len=resolved.max_request_tokens, created=created)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._client, self._tokenizer, self._model, max_body_bytes=self._settings.max_body_bytes)

    async def drain(self) -> int:
        """Called before a shutdown; see HandleClient.drain."""
        return await self._client.drain(self._settings.drain_timeout_s)


def _load_tokenizer(settings: AppSettings) -> tuple[Tokenizer, int]:
    """The model's tokenizer, and when the model was made: the same time in every replica."""
    if settings.engine.executor == "fake":
        return Tokenizer.byte_level(), 0
    path = prepare_model(settings.model, weights=settings.engine.load_format != "dummy")
    return Tokenizer.from_dir(path), int((path / "config.json").stat().st_mtime)
