"""Owns when requests must have begun, and when they must have ended: a heap of times.
Never ends a request; it says whose time has come."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from engine.request import Request

_SPARE = 64


class Deadlines:
    def __init__(self, find: Callable[[str], Request | None]) -> None:
        """`find` gives a live request by its id."""
        self._find = find
        self._heap: list[tuple[float, int, bool, str]] = []  # (when, ticket, also if it runs, request id)
        self._compact_at = _SPARE

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest time, of a request that may have ended by itself."""
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request, now: float) -> None:
        for running_too, timeout_s in ((False, request.queue_timeout_s), (True, request.timeout_s)):
            if timeout_s is not None:
                heapq.heappush(self._heap, (now + timeout_s, request.ticket, running_too, request.request_id))
        if len(self._heap) > self._compact_at:  # long deadlines of short requests would pile up
            self._heap = [entry for entry in self._heap if self._live(entry[3], entry[1])]
            heapq.heapify(self._heap)
            self._compact_at = _SPARE + 2 * len(self._heap)

    def passed(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests whose time has come, and how long it was. That for the queue is only for those that never ran."""
        while self._heap and self._heap[0][0] <= now:
            _, ticket, running_too, request_id = heapq.heappop(self._heap)
            request = self._live(request_id, ticket)
            if request is not None and running_too:
                yield request, f"{request.timeout_s} s"
            elif request is not None and not request.was_scheduled:
                yield request, f"{request.queue_timeout_s} s in the queue"

    def _live(self, request_id: str, ticket: int) -> Request | None:
        """An id may be another's by now."""
        request = self._find(request_id)
        return request if request is not None and request.ticket == ticket else None
