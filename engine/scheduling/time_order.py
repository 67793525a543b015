"""Owns the order of prompts by time: short before long within bounds, and those that can still be in time first.
Never reads a clock or a queue: it is told when a request came, and says its place and when that changes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.request import Request
from engine.scheduling.sorted_list import SortedList

OVERTAKING = 8.0
"""A prompt whose prefill takes a second less than another's goes before it if it comes up to this many seconds
later."""


@dataclass(frozen=True, slots=True)
class Order:
    """Places by time, in microseconds. Each is fixed when a request comes, and moves at most once.

        place = arrival + ttft target + OVERTAKING * predicted prefill     (the last term at most `bound_s`)
              + bound_s, once the first token can no longer be in time

    So of two requests with one target, the earlier one goes first if it came more than two bounds earlier: nobody
    starves, however many short prompts come, and however wrong the predictions are.
    """

    bound_s: float

    def place(self, request: Request) -> tuple[int, int]:
        behind = min(OVERTAKING * request.prefill_s, self.bound_s)
        return round((request.arrived + request.ttft_s + behind) * 1e6), request.arrival_index

    def put_behind(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return the place of a request that can no longer be in time."""
        return place[0] + round(self.bound_s * 1e6), place[1]


class Hopes:
    """Waiting requests by the moment when they can no longer be in time. Each change costs O(log n), and an ended
    request leaves nothing behind: its target may be a day."""

    def __init__(self) -> None:
        self._by_time: SortedList[tuple[float, int, Request]] = SortedList()  # as _hope
        self._here: set[int] = set()  # arrival indices

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, request: Request) -> None:
        self._here.add(request.arrival_index)
        self._by_time.add(_hope(request))

    def remove(self, request: Request) -> None:
        """Forget a request that has begun or ended. Does nothing if it is not here."""
        if request.arrival_index in self._here:
            self._here.remove(request.arrival_index)
            self._by_time.remove(_hope(request))

    def lost(self, now: float) -> list[Request]:
        """Remove and return the requests whose moment has passed."""
        found = []
        while self._by_time and self._by_time.first[0] <= now:
            found.append(self._by_time.first[2])
            self.remove(found[-1])
        return found


def _hope(request: Request) -> tuple[float, int, Request]:
    """Return when the request can no longer be in time, with what tells it from others."""
    return request.arrived + request.ttft_s - request.prefill_s, request.arrival_index, request
