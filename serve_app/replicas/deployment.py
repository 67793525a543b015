"""Implements the two deployments: an engine replica and an ingress replica in a Ray Serve process.
Never parses HTTP and never schedules tokens: it connects the parts that do to Serve's lifecycle."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.async_engine import AsyncEngine
from engine.build.engine import build_engine
from engine.checkpoints.prepare import prepare_model
from engine.config import EngineConfig, ResolvedConfig
from engine.protocol import AdapterRef, EngineError, ErrorCode, Failed, LoadSnapshot, SamplingParams
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.adapters.names import AdapterNames
from serve_app.admission.fleet_forecast import fleet_forecast
from serve_app.admission.gate import Gate
from serve_app.api.generation.live import LiveRequests
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.api.timing.recent import RecentTimes
from serve_app.auth.keys import Keys
from serve_app.channel.handle_client import HandleClient
from serve_app.channel.migration import Migration
from serve_app.channel.roll_call import call_the_roll
from serve_app.channel.token_receiver import TokenReceiver
from serve_app.channel.token_sender import TokenSender
from serve_app.engines.engine_call import ChannelAddress, EngineCall
from serve_app.engines.engine_client import ServedModel
from serve_app.engines.engine_count import num_engines, on_change
from serve_app.engines.engine_load import engine_load
from serve_app.images.intake import ImageIntake
from serve_app.metrics.activity import IngressActivity
from serve_app.metrics.channel_counts import ChannelCounts
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.store_counts import StoreCounts
from serve_app.metrics.timing import FoundTiming
from serve_app.metrics.values import ReplicaSamples, encode
from serve_app.parsing.choice import chosen_parser
from serve_app.parsing.reasoning_parsers import suggest_reasoning_parser
from serve_app.parsing.tools import suggest_tool_parser
from serve_app.replicas.interpreter import spare_garbage_collections, take_short_turns
from serve_app.replicas.watchdog import Watchdog
from serve_app.routing.stats import RoutingReporter
from serve_app.scaling.signals import EngineSignals
from serve_app.settings.application import AppSettings
from serve_app.settings.features import refused_images
from serve_app.store.memory import AnswerMemory, LocalMemory
from serve_app.store.shared import SharedMemory
from serve_app.tracing.export import make_tracer

HTTP_API = "serve_app.api.ingress"
"""Imported late, in the ingress while the engine loads: it makes up most of all imports, and neither the builder of the
application nor an engine replica, which the start waits for, needs any of it."""

logger = logging.getLogger(__name__)


def share_threads(engine: EngineConfig, engine_replicas: int) -> EngineConfig:
    """Give each engine its share of this process's cores, unless the config sets the number of threads: replicas with
    one thread per core each would compete for the cores."""
    if engine.num_threads is not None:
        return engine
    cores = len(os.sched_getaffinity(0))
    return dataclasses.replace(engine, num_threads=max(1, cores // engine_replicas))


def log_as_serve_does() -> None:
    """Give our loggers the handlers and the level of Serve's own: without them a replica loses messages at INFO, such
    as the configuration that the engine resolved, and why."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("engine", "serve_app"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = serve_logger.handlers, False
        ours.setLevel(serve_logger.level)


async def warm_up(engine: AsyncEngine) -> None:
    """Run the largest prefill step and a decode step. The first ones of a process are slow, because threads start and
    operators choose their code, and no request should wait for that.

    Raises:
        EngineError: the engine cannot serve.
    """
    config = engine.config
    prompt = [0] * max(1, min(config.max_prefill_tokens, config.max_request_tokens - 2))
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0, ignore_eos=True, max_tokens=2)
    async for event in engine.generate(prompt, sampling, "warm-up"):
        if isinstance(event, Failed):
            raise EngineError(event.code, f"The engine failed to warm up: {event.message}")
    await engine.reset_prefix_cache()


class EngineReplica:
    """Runs one engine in a process of its own. Takes and returns token ids."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]
        log_as_serve_does()
        engine = share_threads(settings.replica_engine, settings.most_engines)
        self._engine = await asyncio.to_thread(build_engine, settings.model, engine, settings.most_engines)
        await warm_up(self._engine)
        self._adapters = NamedAdapters(self._engine)
        await self._adapters.load_all(settings.lora_adapters)
        config = self._engine.config
        self._signals = EngineSignals(
            settings.signals,
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
        )
        self._routing = RoutingReporter(
            self._engine, settings.routing.published_blocks, lambda: self._signals.prefill_tokens_per_s
        )
        self._recorder = EngineRecorder(config)
        self._engine.observe(self._recorder)  # only now, so that the warm-up does not count as a request
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._sender = TokenSender(
            self._engine, self._replica_id, self._signals.observe, patience_s=settings.engine_silence_s
        )
        self._watchdog = Watchdog(settings.hang_timeout_s, lambda: not self._engine.has_stalled)
        take_short_turns()
        spare_garbage_collections()

    async def generate(self, call: EngineCall) -> bytes | EngineError:
        """Run one request; see TokenSender.generate. A refusal is returned and not raised, because Serve would log a
        traceback for each."""
        request_id, num_tokens = call.submission.request_id, len(call.submission.prompt_token_ids)
        costs = self._engine.load().prefill_costs
        self._signals.submitted(request_id, num_tokens, call.channel.endpoint, call.num_waiting, costs)
        try:
            return await self._sender.generate(call)
        except EngineError as error:
            if error.code is ErrorCode.QUEUE_FULL:
                self._signals.refused(request_id)
            return error
        finally:
            self._signals.ended(request_id)

    async def beat_for(self, ingress: ChannelAddress) -> None:
        """Send beats to an ingress replica that does not hear of some engine; broadcast to every engine replica."""
        self._sender.attach(ingress)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the signals for EngineLoadPolicy; called by Serve."""
        return self._signals.report(self._engine.load()).as_stats()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the report for the EngineRouter of each ingress replica; called by Serve."""
        return await self._routing.report()

    async def resolved_config(self) -> ResolvedConfig:
        return self._engine.config

    async def load(self) -> LoadSnapshot:
        return self._engine.load()

    async def metrics(self) -> bytes:
        """See EngineClient.metrics; broadcast to every engine replica, including those with a dead engine."""
        return encode(ReplicaSamples(self._replica_id, self._recorder.samples(self._engine.load())))

    async def activity(self, after: dict[str, int]) -> bytes:
        """See EngineClient.activity; broadcast to every engine replica."""
        return encode(self._recorder.activity(self._replica_id, self._engine.load(), after.get(self._replica_id)))

    async def adapters(self) -> list[AdapterRef]:
        """List the adapters; each ingress replica asks all engine replicas for them when it starts."""
        return self._adapters.known

    async def load_adapter(self, name: str, path: str) -> tuple[str, AdapterRef | EngineError]:
        """See EngineClient.load_adapter; broadcast to every engine replica. A refusal is returned and not raised."""
        try:
            return self._replica_id, await self._adapters.load(name, path)
        except EngineError as error:
            return self._replica_id, error

    async def restore_adapter(self, name: str, before: AdapterRef | None) -> None:
        """Undo a load that another engine replica refused."""
        self._adapters.restore(name, before)

    async def unload_adapter(self, name: str) -> None:
        """See EngineClient.unload_adapter; broadcast to every engine replica."""
        self._adapters.unload(name)

    async def reset_prefix_cache(self) -> int:
        return await self._engine.reset_prefix_cache()

    async def check_health(self) -> None:
        """Raise EngineError if the engine is dead. Serve restarts the replica after several failures; streams move
        elsewhere at the first."""
        try:
            await self._engine.check_health()
        except EngineError as error:
            self._sender.fail(error)
            raise

    def __del__(self) -> None:
        """Stop the engine; called by Serve when the replica stops. The constructor may have failed before it
        existed."""
        if engine := getattr(self, "_engine", None):
            engine.shutdown()


class IngressReplica:
    """Runs the HTTP side, with an ASGI app of its own in each replica."""

    async def __init__(  # type: ignore[misc]
        self, settings: AppSettings, engine: DeploymentHandle, store: DeploymentHandle | None = None
    ) -> None:
        """`store`: of responses, where all ingress replicas share one."""
        log_as_serve_does()
        self._settings = settings
        self._tokenizer, created = await asyncio.to_thread(_load_tokenizer, settings)
        await asyncio.to_thread(import_module, HTTP_API)
        resolved: ResolvedConfig = await engine.resolved_config.remote()
        counts = ChannelCounts()
        receiver = TokenReceiver(
            ray.util.get_node_ip_address(),
            settings.max_unread_tokens,
            counts,
            engine_silence_s=settings.engine_silence_s,
        )
        longest = resolved.max_request_tokens
        migration = Migration(settings.max_migrations, settings.migration_timeout_s, longest, counts)
        here = serve.get_replica_context()
        self._replica_id = here.replica_id.unique_id
        others = serve.get_deployment_handle(here.deployment, here.app_name)
        # Calls by value use gRPC, which takes two thirds of the time of Ray's streaming actor calls to set up.
        calls = engine.options(_by_reference=False)
        may_sleep = settings.autoscaling is not None and settings.autoscaling.min_replicas == 0
        self._client = HandleClient(
            calls, others, receiver, migration, lambda: self._gate.num_waiting, may_sleep=may_sleep, large=engine
        )
        self._gate = Gate(settings.gate_policy, num_engines, forecast=fleet_forecast)
        stored = StoreCounts()
        self._memory = _memory(settings, store, stored)
        self._recorder = IngressRecorder(self._gate, counts, stored)
        self._loop = asyncio.get_running_loop()
        self._roll_call = asyncio.ensure_future(call_the_roll(engine, receiver))
        self._watchdog = Watchdog(settings.hang_timeout_s)
        on_change(self._use_new_engines)
        self._live = LiveRequests()
        self._recent_times = RecentTimes()
        self._tracer = make_tracer(settings.tracing, settings.model_id, self._replica_id)
        self._keys = Keys.load(settings.auth)
        template = self._tokenizer.chat_template.source if self._tokenizer.chat_template else None
        self._model = ServedModel(
            id=settings.model_id,
            max_model_len=longest,
            created=created,
            tool_parser=chosen_parser("tool_parser", settings.tool_parser, template, suggest_tool_parser),
            pooling=None if settings.pooling == "none" else settings.pooling,
            reasoning_parser=chosen_parser(
                "reasoning_parser", settings.reasoning_parser, template, suggest_reasoning_parser
            ),
            images=_image_intake(settings, resolved),
            targets=resolved.targets,
        )
        self._adapters = AdapterNames(
            self._model,
            await self._client.adapters() if resolved.max_loras else (),
            other_names=settings.model_names[1:],
            aliases=settings.model_aliases,
        )
        take_short_turns()
        spare_garbage_collections()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from serve_app.api.generation.sealing import make_seal
        from serve_app.api.ingress import create_app

        return create_app(
            self._client,
            self._tokenizer,
            self._model,
            max_body_bytes=self._settings.max_body_bytes,
            client_stall_timeout_s=self._settings.client_stall_timeout_s,
            sse_keep_alive_s=self._settings.sse_keep_alive_s,
            names_responses=False,
            gate=self._gate,
            keys=self._keys,
            live=self._live,
            recent_times=self._recent_times,
            recorder=self._recorder,
            trace=self._tracer,
            engine_load=engine_load,
            adapters=self._adapters,
            allow_lora_updates=self._settings.allow_lora_updates,
            strict=self._settings.strict,
            drop_billing_header=self._settings.drop_billing_header,
            cors=self._settings.cors,
            seal=make_seal(self._settings.reasoning_keys, self._settings.ingress_replicas),
            memory=self._memory,
        )

    def _use_new_engines(self) -> None:
        """Let waiting requests use an engine that joined; called on the router's thread."""
        self._loop.call_soon_threadsafe(self._gate.refresh)

    async def metrics(self) -> bytes:
        """See EngineClient.metrics; broadcast to every ingress replica."""
        return encode(ReplicaSamples(self._replica_id, self._recorder.samples()))

    async def activity(self) -> bytes:
        """See EngineClient.activity; broadcast to every ingress replica."""
        return encode(IngressActivity.of(self._replica_id, self._gate.snapshot()))

    async def timing(self, name: str, tenant: str) -> bytes:
        """See EngineClient.timing; broadcast to every ingress replica."""
        return encode(FoundTiming(await self._recent_times.find(name, tenant)))

    async def abort(self, name: str) -> bool:
        """See EngineClient.abort; broadcast to every ingress replica."""
        return self._live.abort(name) > 0

    async def set_adapter(self, name: str, adapter: AdapterRef | None) -> None:
        """See EngineClient.load_adapter and unload_adapter; broadcast to every ingress replica. None means unloaded."""
        if adapter is None:
            self._adapters.remove(name)
        else:
            self._adapters.put(adapter)

    async def set_draining(self, draining: bool) -> None:
        """See EngineClient.drain_all; broadcast to every ingress replica."""
        if draining:
            self._gate.close()
        else:
            self._gate.reopen()

    async def drain(self) -> int:
        """Drain before a shutdown: let requests finish, end the rest with errors, and return how many those were."""
        num_late = await self._gate.drain(self._settings.drain_timeout_s)
        self._client.end()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.flush)
        return num_late

    def __del__(self) -> None:
        """Stop the tracer; called by Serve when the replica stops. The constructor may have failed before it
        existed."""
        if tracer := getattr(self, "_tracer", None):
            tracer.shutdown()


def _memory(settings: AppSettings, store: DeploymentHandle | None, counts: StoreCounts) -> AnswerMemory | None:
    """None: nothing is kept."""
    if store is not None:
        return SharedMemory(store, settings.responses_store, counts)
    return LocalMemory(settings.responses_store, counts) if settings.responses_store.max_bytes else None


def _image_intake(settings: AppSettings, resolved: ResolvedConfig) -> ImageIntake | None:
    kind = next((kind for kind in resolved.inputs if kind.name == "image"), None)
    if kind is None and (refusal := refused_images(settings.images, settings.model_id)):
        raise ValueError(refusal)
    return None if kind is None else ImageIntake(kind, settings.images)


def _load_tokenizer(settings: AppSettings) -> tuple[Tokenizer, int]:
    """Load the model's tokenizer, and return it with the model's creation time, in seconds since 1970: when its GGUF
    file, or else its config.json, was written. It is the same in replicas that read the same file, and not in those
    with a cache of their own, or with the packaged default, which has no file but its prepared form."""
    if settings.engine.executor == "fake":
        return Tokenizer.byte_level(images=settings.engine.fake.images), 0
    path = prepare_model(settings.model, weights=settings.engine.load_format != "dummy", **settings.tokenizer_form)
    written = Path(settings.model).expanduser() if settings.model.endswith(".gguf") else path / "config.json"
    return Tokenizer.from_dir(path), int(written.stat().st_mtime)
