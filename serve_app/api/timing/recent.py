"""Keeps the times of the requests that ended last in this ingress replica.
Never shows a request to another tenant: for that tenant it does not exist, and pushes none of its own out."""

from __future__ import annotations

import asyncio
from collections import deque

from serve_app.api.timing.split import EndedTimes
from serve_app.metrics.timing import Timing

MOST_KEPT = 1024
"""The most requests of a tenant that are kept, about two kilobytes each."""
PATIENCE_S = 0.2
"""How long a question waits for an engine to say where its time went, which takes a step if a stop string ended the
answer."""


class RecentTimes:
    """Requests by their names: the id of an answer, or else an X-Request-Id. Of several of one name, the last to end
    counts."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._tenants: dict[str, _Tenant] = {}  # as many as there are keys

    def add(self, ended: EndedTimes, tenant: str) -> None:
        self._tenants.setdefault(tenant, _Tenant()).add(ended, self._most)

    async def find(self, name: str, tenant: str) -> Timing | None:
        """Return where the time of a request went; None if this tenant has none of that name here."""
        ended = self._tenants[tenant].find(name) if tenant in self._tenants else None
        if ended is None:
            return None
        if ended.awaits_engine and ended.times.now() < ended.ended + PATIENCE_S:
            await asyncio.sleep(PATIENCE_S)
        return ended.timing()


class _Tenant:
    def __init__(self) -> None:
        self._order: deque[EndedTimes] = deque()
        self._answers: dict[str, EndedTimes] = {}
        self._requests: dict[str, EndedTimes] = {}  # by X-Request-Id, which a client may choose: also an answer's id

    def add(self, ended: EndedTimes, most: int) -> None:
        self._order.append(ended)
        if ended.answer_id is not None:
            self._answers[ended.answer_id] = ended
        self._requests[ended.request_id] = ended
        if len(self._order) > most:
            self._forget(self._order.popleft())

    def _forget(self, ended: EndedTimes) -> None:
        if ended.answer_id is not None:
            self._answers.pop(ended.answer_id, None)
        if self._requests.get(ended.request_id) is ended:
            del self._requests[ended.request_id]

    def find(self, name: str) -> EndedTimes | None:
        return self._answers.get(name) or self._requests.get(name)
