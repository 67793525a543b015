"""Owns the API's interface to a store of answers, and the store of an ingress replica that shares it with no other.
Never lets a request fail: what cannot be asked for is not found, and what cannot be kept is said not to be."""

from __future__ import annotations

import asyncio
from typing import Protocol

from serve_app.metrics.store_counts import StoreCounts
from serve_app.settings.responses_store import ResponsesStoreSettings
from serve_app.store.bounded import BoundedStore
from serve_app.store.entry import Entry, Recalled, Wanted

_SWEEP_S = 1.0
"""Between two looks for what is too old, at least."""


class AnswerMemory(Protocol):
    settings: ResponsesStoreSettings

    async def put(self, tenant: str, entry: Entry) -> bool:
        """Keep an answer. Return whether it is kept."""
        ...

    async def recall(self, tenant: str, wanted: Wanted) -> Recalled: ...

    async def get(self, tenant: str, response_id: str) -> Entry | None: ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete an answer. Return whether there was one."""
        ...


class LocalMemory:
    """Keeps answers in this process. Old ones leave it whether or not anybody asks."""

    def __init__(
        self,
        settings: ResponsesStoreSettings,
        counts: StoreCounts | None = None,
        store: BoundedStore | None = None,
    ) -> None:
        self.settings = settings
        self.counts = counts or StoreCounts()
        self._store = store or BoundedStore(settings.max_bytes, settings.max_age_s)
        self._timer: asyncio.TimerHandle | None = None

    async def put(self, tenant: str, entry: Entry) -> bool:
        is_kept = self._store.put(tenant, entry)
        self._note()
        return is_kept

    async def recall(self, tenant: str, wanted: Wanted) -> Recalled:
        recalled = self._store.recall(tenant, wanted)
        self.counts.looked_up(is_found=recalled.missing is None)
        self._note()
        return recalled

    async def get(self, tenant: str, response_id: str) -> Entry | None:
        entry = self._store.get(tenant, response_id)
        self.counts.looked_up(is_found=entry is not None)
        self._note()
        return entry

    async def delete(self, tenant: str, response_id: str) -> bool:
        is_gone = self._store.delete(tenant, response_id)
        self._note()
        return is_gone

    def _note(self) -> None:
        """Count what is kept, and see that it leaves in time."""
        self.counts.num_entries, self.counts.num_bytes = self._store.num_entries, self._store.num_bytes
        if self._timer is None and self._store.num_entries:
            self._sweep()

    def _sweep(self) -> None:
        self._timer, left_s = None, self._store.expire()
        self.counts.num_entries, self.counts.num_bytes = self._store.num_entries, self._store.num_bytes
        if left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(_SWEEP_S, left_s), self._sweep)
