"""Owns when requests must have begun, and when they must have ended, in order of time.
Never ends a request; it says whose time has come."""

from __future__ import annotations

from collections.abc import Iterator

from engine.scheduling.request import Request
from engine.scheduling.sorted_list import SortedList

_Deadline = tuple[float, int, bool, Request]
"""(when, arrival index, also if it runs, request): the first three differ from every other's."""


class Deadlines:
    """Those of live requests alone: what has ended leaves nothing that would be swept up later, all at once."""

    def __init__(self) -> None:
        self._by_time: SortedList[_Deadline] = SortedList()
        self._by_arrival: dict[int, list[_Deadline]] = {}  # by arrival index: an id may be another's by now

    def __len__(self) -> int:
        return len(self._by_time)

    @property
    def next(self) -> float | None:
        """The earliest time. One in the queue may be of a request that runs, and then comes to nothing."""
        return self._by_time.first[0] if self._by_time else None

    def add(self, request: Request, now: float) -> None:
        for running_too, timeout_s in ((False, request.queue_timeout_s), (True, request.timeout_s)):
            if timeout_s is not None:
                deadline = (now + timeout_s, request.arrival_index, running_too, request)
                self._by_time.add(deadline)
                self._by_arrival.setdefault(request.arrival_index, []).append(deadline)

    def remove(self, request: Request) -> None:
        """The request has ended. Ignored for one that has no deadline."""
        for deadline in self._by_arrival.pop(request.arrival_index, ()):
            self._by_time.remove(deadline)

    def passed(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests whose time has come, and how long it was. That for the queue is only for those that never ran."""
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
