"""Owns the two deployments: what an engine replica and an ingress replica do in a Ray Serve process.
Never parses HTTP and never schedules tokens; it joins the parts that do to Serve's lifecycle."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.build import build_engine
from engine.config import EngineConfig, ResolvedConfig
from engine.prepare import prepare_model
from engine.protocol import EngineError, LoadSnapshot
from serve_app.engine_call import EngineCall
from serve_app.engine_client import ServedModel
from serve_app.handle_client import HandleClient
from serve_app.ingress import create_app
from serve_app.migration import Migration
from serve_app.settings import AppSettings
from serve_app.token_receiver import TokenReceiver
from serve_app.token_sender import TokenSender
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
        self._sender = TokenSender(self._engine, serve.get_replica_context().replica_id.unique_id)
        # What lives as long as the process is not searched again: full collections paused steps for 20 to 30 ms.
        gc.collect()
        gc.freeze()

    async def generate(self, call: EngineCall) -> bytes | EngineError:
        """Run one request; see TokenSender.generate. A refusal is returned, not raised: Serve would log a traceback
        for each."""
        try:
            return await self._sender.generate(call)
        except EngineError as error:
            return error

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
        self._tokenizer, created = await asyncio.to_thread(_load_tokenizer, settings)
        resolved: ResolvedConfig = await engine.resolved_config.remote()
        receiver = TokenReceiver(ray.util.get_node_ip_address(), settings.max_unread_tokens)
        migration = Migration(settings.max_migrations, settings.migration_timeout_s, resolved.max_request_tokens)
        self._client = HandleClient(engine, receiver, migration)
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
