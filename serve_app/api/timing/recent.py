"""Keeps the times of the requests that ended last in this ingress replica.
Never shows a request to another tenant: for that tenant it does not exist."""

from __future__ import annotations

from collections import deque

from serve_app.api.timing.split import EndedTimes
from serve_app.metrics.timing import Timing

MOST_KEPT = 4096
"""The most requests that are kept, about a kilobyte each."""

_Name = tuple[str, str]
"""A tenant, and the id of an answer or the X-Request-Id of a request."""


class RecentTimes:
    """Requests by their names. Of several of one name, the last to end counts."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._order: deque[tuple[EndedTimes, tuple[_Name, ...]]] = deque()
        self._by_name: dict[_Name, EndedTimes] = {}

    def add(self, ended: EndedTimes, tenant: str) -> None:
        names = tuple((tenant, name) for name in (ended.answer_id, ended.request_id) if name)
        self._by_name.update(dict.fromkeys(names, ended))
        self._order.append((ended, names))
        if len(self._order) > self._most:
            self._forget(*self._order.popleft())

    def _forget(self, ended: EndedTimes, names: tuple[_Name, ...]) -> None:
        for name in names:
            if self._by_name.get(name) is ended:
                del self._by_name[name]

    def find(self, name: str, tenant: str) -> Timing | None:
        """Return where the time of a request went; None if this tenant has none of that name here."""
        ended = self._by_name.get((tenant, name))
        return None if ended is None else ended.timing()
