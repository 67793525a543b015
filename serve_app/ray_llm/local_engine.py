"""Implements EngineClient for an engine in the same process, beside no other.
Never moves a stream: if the engine fails, so do its streams, and Serve replaces the replica."""

from __future__ import annotations

from collections.abc import Mapping

from engine.async_engine import AsyncEngine
from engine.protocol import AdapterRef, LoadSnapshot
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.admission.gate import Gate
from serve_app.engines.own_engine import OwnEngine
from serve_app.metrics.activity import FleetActivity, IngressActivity
from serve_app.metrics.engine_recorder import EngineRecorder
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.values import ReplicaSamples


class MeasuredEngine(OwnEngine):
    """An engine of this process with its adapters and numbers."""

    def __init__(
        self,
        engine: AsyncEngine,
        adapters: NamedAdapters,
        recorder: EngineRecorder,
        ingress: IngressRecorder,
        gate: Gate,
        replica_id: str,
    ) -> None:
        """`recorder` and `ingress` measure the engine and the API. `replica_id`: the name of both in metrics."""
        super().__init__(engine)
        self._adapters = adapters
        self._recorder, self._ingress, self._gate = recorder, ingress, gate
        self._replica_id = replica_id

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def load(self) -> list[LoadSnapshot]:
        return [self._engine.load()]

    async def metrics(self) -> Scrape:
        engine = ReplicaSamples(self._replica_id, self._recorder.samples(self._engine.load()))
        return Scrape((engine,), (ReplicaSamples(self._replica_id, self._ingress.samples()),))

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        name = self._replica_id
        engine = self._recorder.activity(name, self._engine.load(), after.get(name))
        return FleetActivity((engine,), (IngressActivity.of(name, self._gate.snapshot()),))

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        return await self._adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    async def reset_prefix_cache(self) -> list[int]:
        return [await self._engine.reset_prefix_cache()]
