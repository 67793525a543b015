"""Owns the store that all ingress replicas share, a replica of its own, and their access to it.
Never waits long for it: while it does not answer, nothing is found and nothing is kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from grpc.aio import AioRpcError
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serve_app.metrics.store_counts import StoreCounts
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store.entry import Entry, Recalled, Wanted
from serve_app.store.memory import LocalMemory

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a request waits for the store, which answers in milliseconds."""
PAUSE_S = 5.0
"""How long nobody asks after it has not answered: not each request waits for a store that is down."""

_FAILURES = (
    RayError,
    AioRpcError,
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
    TimeoutError,
)
Answer = tuple[Any, int, int]
"""What a call returns, and how many entries and bytes there are then."""


class StoreReplica:
    """Serves the store at the other end, as the only replica of a Serve deployment."""

    def __init__(self, settings: ResponsesStoreSettings) -> None:
        self._memory = LocalMemory(settings)

    async def put(self, tenant: str, entry: Entry) -> Answer:
        return self._told(await self._memory.put(tenant, entry))

    async def recall(self, tenant: str, wanted: Wanted) -> Answer:
        return self._told(await self._memory.recall(tenant, wanted))

    async def get(self, tenant: str, response_id: str) -> Answer:
        return self._told(await self._memory.get(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> Answer:
        return self._told(await self._memory.delete(tenant, response_id))

    def _told(self, value: Any) -> Answer:
        return value, self._memory.counts.num_entries, self._memory.counts.num_bytes


class SharedMemory:
    """Implements AnswerMemory with the shared store."""

    def __init__(
        self,
        store: DeploymentHandle,
        settings: ResponsesStoreSettings,
        counts: StoreCounts,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._store = store
        self._counts = counts
        self._now = now
        self._asks_again_at = float("-inf")

    async def put(self, tenant: str, entry: Entry) -> bool:
        return bool(await self._ask("put", tenant, entry))

    async def recall(self, tenant: str, wanted: Wanted) -> Recalled:
        first = wanted.previous or next((item for _, item in wanted.items), None)
        recalled = await self._ask("recall", tenant, wanted) or Recalled(missing=first)
        assert isinstance(recalled, Recalled)
        self._counts.looked_up(is_found=recalled.missing is None)
        return recalled

    async def get(self, tenant: str, response_id: str) -> Entry | None:
        entry = await self._ask("get", tenant, response_id)
        assert entry is None or isinstance(entry, Entry)
        self._counts.looked_up(is_found=entry is not None)
        return entry

    async def delete(self, tenant: str, response_id: str) -> bool:
        return bool(await self._ask("delete", tenant, response_id))

    async def _ask(self, method: str, tenant: str, what: object) -> Any:
        """Call the store. Return None if it does not answer."""
        if self._now() < self._asks_again_at:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await getattr(self._store, method).remote(tenant, what)
        except _FAILURES as error:
            self._asks_again_at = self._now() + PAUSE_S
            logger.warning("the store of responses does not answer: %s", type(error).__name__)
            return None
        value, self._counts.num_entries, self._counts.num_bytes = answer
        return value
