"""Owns the deadlines by which requests must begin or end, in order of time.
Never ends a request: it reports those whose deadline has passed."""

from __future__ import annotations

from collections.abc import Iterator

from engine.scheduling.request import Request
from engine.scheduling.sorted_list import SortedList

_Deadline = tuple[float, int, bool, Request]
"""(time, arrival index, whether it also applies to a running request, request). The first three are unique."""


class Deadlines:
    """The deadlines of live requests only. An ended request leaves nothing behind that would need cleaning up later."""

    def __init__(self) -> None:
        self._by_time: SortedList[_Deadline] = SortedList()
        self._by_arrival: dict[int, list[_Deadline]] = {}  # by arrival index, since ids are reused

    def __len__(self) -> int:
        return len(self._by_time)

    @property
    def next(self) -> float | None:
        """The earliest deadline. If it is for the queue and its request already runs, it has no effect."""
        return self._by_time.first[0] if self._by_time else None

    def add(self, request: Request, now: float) -> None:
        for running_too, timeout_s in ((False, request.queue_timeout_s), (True, request.timeout_s)):
            if timeout_s is not None:
                deadline = (now + timeout_s, request.arrival_index, running_too, request)
                self._by_time.add(deadline)
                self._by_arrival.setdefault(request.arrival_index, []).append(deadline)

    def remove(self, request: Request) -> None:
        """Remove the deadlines of a request that has ended. Does nothing if it has none."""
        for deadline in self._by_arrival.pop(request.arrival_index, ()):
            self._by_time.remove(deadline)

    def passed(self, now: float) -> Iterator[tuple[Request, str]]:
        """Yield the requests whose deadline has passed, with its length. A queue deadline is only for requests that
        never ran."""
        while self._by_time and self._by_time.first[0] <= now:
            deadline = self._by_time.first
            self._by_time.remove(deadline)
            _, arrival_index, running_too, request = deadline
            self._by_arrival[arrival_index].remove(deadline)
            if not self._by_arrival[arrival_index]:
                del self._by_arrival[arrival_index]
            if running_too:
                yield request, f"{request.timeout_s} s"
            elif not request.was_scheduled:
                yield request, f"{request.queue_timeout_s} s in the queue"
