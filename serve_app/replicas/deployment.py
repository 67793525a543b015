"""Implements the two deployments: an engine replica and an ingress replica in a Ray Serve process.
Never parses HTTP and never schedules tokens: it connects the parts that do to Serve's lifecycle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.build.engine import build_engine
from engine.protocol import AdapterRef, EngineError, ErrorCode, LoadSnapshot
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.admission.room import Room
from serve_app.api.generation.live import LiveRequests
from serve_app.api.timing.recent import RecentTimes
from serve_app.auth.keys import Keys
from serve_app.channel.token_sender import TokenSender
from serve_app.engines.engine_call import ChannelAddress, EngineCall
from serve_app.engines.engine_count import on_change
from serve_app.engines.engine_load import engine_load
from serve_app.engines.versions import EngineFacts, on_news
from serve_app.metrics.activity import IngressActivity
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.store_counts import StoreCounts
from serve_app.metrics.timing import FoundTiming
from serve_app.metrics.values import ReplicaSamples, encode
from serve_app.replicas.cluster import RayCluster
from serve_app.replicas.interpreter import spare_garbage_collections, take_short_turns
from serve_app.replicas.model import OpenModel, open_model
from serve_app.replicas.ranks import launcher_here
from serve_app.replicas.room_maker import RoomMaker, Sleepy
from serve_app.replicas.served_model import read_text_side, share_threads, warm_up
from serve_app.replicas.sleeper import EngineSleeper, meet_in_time
from serve_app.replicas.stopping import end_at_stop, is_stopping
from serve_app.replicas.version import files_digest, wanted_version
from serve_app.replicas.watchdog import Watchdog
from serve_app.routing.stats import RoutingReporter
from serve_app.scaling.signals import EngineSignals
from serve_app.settings.application import AppSettings
from serve_app.settings.ranks import ONE_NODE
from serve_app.store.memory import AnswerMemory, LocalMemory
from serve_app.store.shared import SharedMemory
from serve_app.tracing.export import make_tracer

HTTP_API = "serve_app.api.ingress"
"""Imported late, in the ingress while the engine loads: it makes up most of all imports, and neither the builder of the
application nor an engine replica, which the start waits for, needs any of it."""

logger = logging.getLogger(__name__)


def log_as_serve_does() -> None:
    """Give our loggers the handlers and the level of Serve's own: without them a replica loses messages at INFO, such
    as the configuration that the engine resolved, and why."""
    serve_logger = logging.getLogger("ray.serve")
    for name in ("engine", "serve_app"):
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = list(serve_logger.handlers), False
        ours.setLevel(serve_logger.level)


class EngineReplica:
    """Runs one engine in a process of its own. Takes and returns token ids."""

    async def __init__(self, settings: AppSettings, num_sharing: int) -> None:  # type: ignore[misc]
        """`num_sharing`: the most engines of all models, which may share this machine."""
        log_as_serve_does()
        engine = share_threads(settings.replica_engine, num_sharing)
        launcher = launcher_here(settings.num_ranks, settings.engine_resources, settings.tensor_parallel_placement)
        self._engine = await asyncio.to_thread(build_engine, settings.model, engine, num_sharing, launcher=launcher)
        await warm_up(self._engine)
        self._adapters = NamedAdapters(self._engine)
        await self._adapters.load_all(settings.lora_adapters)
        config = self._engine.config
        self._signals = EngineSignals.of(settings.signals, config)
        files = await asyncio.to_thread(files_digest, settings)
        self._version = replace(wanted_version(settings, num_sharing), files=files)
        self._routing = RoutingReporter(
            self._engine,
            settings.routing.published_blocks,
            lambda: self._signals.prefill_tokens_per_s,
            self._version,
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
            with self._signals.in_use():
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

    async def idle_s(self) -> float | None:
        """Return the seconds since the last request; None while there is one. Broadcast to every engine replica."""
        return self._signals.idle_s()

    async def sleep_if_idle(self) -> bool:
        """Let the autoscaler end this replica for another model, if it has no request; broadcast to all."""
        return self._signals.sleep_if_idle()

    async def facts(self) -> EngineFacts:
        """Return what this replica is, and what it serves."""
        return EngineFacts(self._replica_id, self._version, self._engine.config, tuple(self._adapters.known))

    async def load(self) -> LoadSnapshot:
        return self._engine.load()

    async def metrics(self) -> bytes:
        """See EngineClient.metrics; broadcast to every engine replica, including those with a dead engine."""
        return encode(ReplicaSamples(self._replica_id, self._recorder.samples(self._engine.load())))

    async def activity(self, after: dict[str, int]) -> bytes:
        """See EngineClient.activity; broadcast to every engine replica."""
        return encode(self._recorder.activity(self._replica_id, self._engine.load(), after.get(self._replica_id)))

    async def adapters(self) -> tuple[str, list[AdapterRef]]:
        """List the adapters, with this replica's id; each ingress replica asks all engine replicas for them when it
        starts."""
        return self._replica_id, self._adapters.known

    async def load_adapter(self, name: str, path: str) -> tuple[str, AdapterRef | EngineError]:
        """See EngineClient.load_adapter; broadcast to every engine replica. A refusal is returned and not raised."""
        try:
            return self._replica_id, await self._adapters.load(name, path)
        except EngineError as error:
            return self._replica_id, error

    async def restore_adapter(self, name: str, path: str, before: AdapterRef | None) -> None:
        """Undo a load that failed at another replica; broadcast to every engine replica."""
        self._adapters.restore(name, path, before)

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
        self, settings: AppSettings, engines: Sequence[DeploymentHandle], store: DeploymentHandle | None = None
    ) -> None:
        """`engines`: one handle for each model. `store`: of responses, where all ingress replicas share one."""
        log_as_serve_does()
        self._settings = settings
        alone = settings.each_model()
        texts = [await asyncio.to_thread(read_text_side, model) for model in alone]
        await asyncio.to_thread(import_module, HTTP_API)
        here = serve.get_replica_context()
        self._replica_id = here.replica_id.unique_id
        others = serve.get_deployment_handle(here.deployment, here.app_name)
        stored = StoreCounts()
        self._memory = _memory(settings, store, stored)
        room = Room(settings.room_policy) if settings.models else None
        self._models = {
            model.model_id: open_model(
                model,
                text,
                engine,
                others,
                policy,
                room,
                stored if model is alone[0] else StoreCounts(),
                settings.total_engines,
            )
            for model, text, engine, policy in zip(alone, texts, engines, settings.gate_policies, strict=True)
        }
        self._first = next(iter(self._models.values()))
        self._sleepers = _sleepers(settings, self._models.values(), here.app_name)
        if settings.models:
            await meet_in_time(self._sleepers[one.model_id] for one in settings.models if not one.may_sleep)
        else:  # without its engine there is nothing to serve
            await self._first.learner.meet()
        self._loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(settings.hang_timeout_s)
        on_change(self._use_new_engines)
        on_news(self._meet_new_engines)
        self._meet_new_engines()
        self._live = LiveRequests()
        self._recent_times = RecentTimes()
        self._tracer = make_tracer(settings.tracing, self._first.settings.model_id, self._replica_id)
        self._keys = Keys.load(settings.auth)
        is_stopping()  # fails the start if Ray hides it, and not a stream at the stop
        self._end = asyncio.ensure_future(end_at_stop(settings.drain_timeout_s, self._end_streams))
        take_short_turns()
        spare_garbage_collections()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from serve_app.api.generation.sealing import make_seal
        from serve_app.api.ingress import create_app_of
        from serve_app.api.models.lane import Lane

        lanes = [
            Lane(
                model.client,
                model.text.tokenizer,
                model.names,
                model.gate,
                model.recorder,
                engine_load=partial(engine_load, model.deployment),
                allow_lora_updates=model.settings.allow_lora_updates,
                sleeper=self._sleepers.get(name),
                ask_adapters=model.ask_adapters,
            )
            for name, model in self._models.items()
        ]
        return create_app_of(
            lanes,
            max_body_bytes=self._settings.max_body_bytes,
            client_stall_timeout_s=self._settings.client_stall_timeout_s,
            sse_keep_alive_s=self._settings.sse_keep_alive_s,
            names_responses=False,
            keys=self._keys,
            live=self._live,
            recent_times=self._recent_times,
            trace=self._tracer,
            strict=self._settings.strict,
            drop_billing_header=self._settings.drop_billing_header,
            cors=self._settings.cors,
            seal=make_seal(self._settings.reasoning_keys, self._settings.ingress_replicas),
            memory=self._memory,
        )

    def _use_new_engines(self) -> None:
        """Let waiting requests use an engine that joined; called on the router's thread."""
        for model in self._models.values():
            self._loop.call_soon_threadsafe(model.gate.refresh)

    def _meet_new_engines(self) -> None:
        """Let models learn from engines of their own settings; called on the router's thread."""
        for model in self._models.values():
            self._loop.call_soon_threadsafe(model.learner.look)

    def _model(self, name: str | None) -> OpenModel:
        return self._first if name is None else self._models[name]

    async def metrics(self, model: str | None = None) -> bytes:
        """See EngineClient.metrics; broadcast to every ingress replica. `model`: which one, if there are several."""
        return encode(ReplicaSamples(self._replica_id, self._model(model).recorder.samples()))

    async def activity(self, model: str | None = None) -> bytes:
        """See EngineClient.activity; broadcast to every ingress replica."""
        return encode(IngressActivity.of(self._replica_id, self._model(model).gate.snapshot()))

    async def timing(self, name: str, tenant: str) -> bytes:
        """See EngineClient.timing; broadcast to every ingress replica."""
        return encode(FoundTiming(await self._recent_times.find(name, tenant)))

    async def abort(self, name: str) -> bool:
        """See EngineClient.abort; broadcast to every ingress replica."""
        return self._live.abort(name) > 0

    async def set_adapter(self, name: str, adapter: AdapterRef | None, model: str | None = None) -> None:
        """See EngineClient.load_adapter and unload_adapter; broadcast to every ingress replica. None means unloaded."""
        if adapter is None:
            self._model(model).names.remove(name)
        else:
            self._model(model).names.put(adapter)

    async def restore_adapter(self, loaded: AdapterRef, before: AdapterRef | None, model: str | None = None) -> None:
        """Undo a load of which another replica was not told; broadcast to every ingress replica."""
        self._model(model).names.restore(loaded, before)

    async def set_draining(self, draining: bool) -> None:
        """See EngineClient.drain_all; broadcast to every ingress replica."""
        for model in self._models.values():
            if draining:
                model.gate.close()
            else:
                model.gate.reopen()

    async def drain(self) -> int:
        """Drain before a shutdown: let requests finish, end the rest with errors, and return how many those were."""
        return await self._drain(self._settings.drain_timeout_s)

    async def _end_streams(self) -> None:
        """End what still runs when Serve is about to kill this replica."""
        if num_late := await self._drain(0):
            logger.warning("%s requests did not finish in drain_timeout_s and were ended with an error", num_late)

    async def _drain(self, timeout_s: float) -> int:
        num_late = await asyncio.gather(*(model.gate.drain(timeout_s) for model in self._models.values()))
        for model in self._models.values():
            model.client.end()
        for sleeper in self._sleepers.values():
            sleeper.end()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.flush)
        return sum(num_late)

    def __del__(self) -> None:
        """Stop the tracer; called by Serve when the replica stops. The constructor may have failed before it
        existed."""
        if tracer := getattr(self, "_tracer", None):
            tracer.shutdown()


def _sleepers(settings: AppSettings, models: Iterable[OpenModel], application: str) -> dict[str, EngineSleeper]:
    """Make what wakes each of several models, by its name, or only waits for the engine of one that never sleeps. A
    model that is alone has no rival: its first engine starts with the server."""
    entries = {entry.model_id: entry for entry in settings.models}
    several = [model for model in models if model.settings.model_id in entries]
    sleepy = [model for model in several if model.settings.may_sleep]
    maker = RoomMaker([Sleepy(one.engine, needs_of(one.settings), one.gate) for one in sleepy], RayCluster(application))
    return {
        (name := model.settings.model_id): EngineSleeper(
            model.learner,
            model.deployment,
            name,
            entries[name].wake_timeout_s,
            partial(maker.make_room, model.deployment) if model.settings.may_sleep else None,
        )
        for model in several
    }


def needs_of(settings: AppSettings) -> dict[str, float]:
    """Return what an engine takes of a node, by the names that Ray's tables have for resources. Where its ranks may be
    on several nodes, that is what one of them takes."""
    kind = settings.engine_accelerator_type
    parts = 1 if settings.tensor_parallel_placement == ONE_NODE else settings.num_ranks
    needs = {"CPU": settings.engine_num_cpus / parts, "GPU": settings.engine_num_gpus / parts}
    return needs if kind is None else needs | {f"accelerator_type:{kind}": 0.001}


def _memory(settings: AppSettings, store: DeploymentHandle | None, counts: StoreCounts) -> AnswerMemory | None:
    """None: nothing is kept."""
    if store is not None:
        return SharedMemory(store, settings.responses_store, counts)
    return LocalMemory(settings.responses_store, counts) if settings.responses_store.max_bytes else None
