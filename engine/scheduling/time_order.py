"""Owns the order of prompts by time: short before long within bounds, and those that can still be in time first.
Never reads a clock or a queue: it is told when a request came, and says its place and when that changes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from engine.scheduling.request import Request

OVERTAKING = 8.0
"""A prompt whose prefill takes a second less than another's goes before it if it comes up to this many seconds
later."""


class Moment(NamedTuple):
    """When a waiting request can no longer be in time."""

    hopeless_at: float
    arrival_index: int
    request: Request


@dataclass(frozen=True, slots=True)
class Order:
    """Places by time, in microseconds. Each is fixed when a request comes, and moves at most once.

        place = arrival + ttft target + OVERTAKING * predicted prefill     (the last term at most `bound_s`)
              + bound_s, once the first token can no longer be in time

    So of two requests with one target, the earlier one goes first if it came more than two bounds earlier: nobody
    starves, however many short prompts come, and however wrong the predictions are.
    """

    bound_s: float

    def place(self, request: Request, now: float, prefill_s: float) -> tuple[int, int]:
        behind = min(OVERTAKING * prefill_s, self.bound_s)
        return round((now + request.ttft_s + behind) * 1e6), request.arrival_index

    def put_behind(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return the place of a request that can no longer be in time."""
        return place[0] + round(self.bound_s * 1e6), place[1]


class Hopes:
    """Waiting requests by the moment when they can no longer be in time. Each change costs O(log n)."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []

    def __len__(self) -> int:
        return len(self._moments)

    def add(self, request: Request, now: float, prefill_s: float) -> None:
        """Note a request that came at `now`, and whose prompt takes `prefill_s`."""
        moment = Moment(now + request.ttft_s - prefill_s, request.arrival_index, request)
        heapq.heappush(self._moments, moment)

    def lost(self, now: float) -> list[Request]:
        """Remove and return the requests whose moment has passed, whether or not they still wait."""
        found = []
        while self._moments and self._moments[0].hopeless_at <= now:
            found.append(heapq.heappop(self._moments).request)
        return found

    def clear(self) -> None:
        self._moments.clear()
