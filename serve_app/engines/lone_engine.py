"""Implements everything but the answers of an engine client for an ingress without replicas, for benchmarks and tests.
Never generates anything: a subclass says what a stream yields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping

from engine.protocol import AdapterRef, Event, LoadSnapshot, Submission
from serve_app.engines.engine_client import StreamRecord
from serve_app.metrics.activity import FleetActivity
from serve_app.metrics.exposition import Scrape
from serve_app.metrics.timing import Timing


class LoneEngine(ABC):
    """An EngineClient that is always healthy, measures nothing, and has neither other replicas nor adapters."""

    @abstractmethod
    def stream(
        self, submission: Submission, *, session: str | None = None, record: StreamRecord | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """See EngineClient.stream."""

    async def check_health(self) -> None:
        return

    async def load(self) -> list[LoadSnapshot]:
        return []

    async def metrics(self) -> Scrape:
        return Scrape()

    async def activity(self, after: Mapping[str, int]) -> FleetActivity:
        return FleetActivity()

    async def abort(self, name: str) -> bool:
        return False

    async def timing(self, name: str, tenant: str) -> Timing | None:
        return None

    async def drain_all(self, draining: bool) -> None:
        return

    async def load_adapter(self, name: str, path: str, before: AdapterRef | None) -> AdapterRef:
        raise NotImplementedError("this engine has no adapters")

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError("this engine has no adapters")

    async def reset_prefix_cache(self) -> list[int]:
        return []
