"""Owns the order of a queue by definition: everything that waits is looked at each time, and nothing is remembered.
Never fast: engine/scheduling/waiting.py has to give the same order."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from engine.scheduling.request import Request


class PlainQueue:
    def __init__(self, age_s: float, answer_weight: float) -> None:
        self._age_s, self._answer_weight = age_s, answer_weight
        self.waiting: list[Request] = []
        self._live: Counter[tuple[int, str]] = Counter()
        self._served: defaultdict[tuple[int, str], float] = defaultdict(float)

    def enter(self, request: Request) -> None:
        lane = _lane_key(request)
        if not self._live[lane]:
            present = [self._served[other] for other, live in self._live.items() if live and other[0] == lane[0]]
            self._served[lane] = max(self._served[lane], min(present, default=0.0))
        self._live[lane] += 1
        self.waiting.append(request)

    def leave(self, request: Request) -> None:
        self._live[_lane_key(request)] -= 1
        if not any(live for lane, live in self._live.items() if lane[0] == request.priority):
            for lane in [lane for lane in self._served if lane[0] == request.priority]:
                del self._served[lane]

    def serve(self, request: Request, prompt_tokens: int, answer_tokens: int) -> None:
        self._served[_lane_key(request)] += prompt_tokens + self._answer_weight * answer_tokens

    def oldest_since(self) -> float | None:
        return min((_since(lane) for lane in self._lanes()), default=None)

    def in_order(self, now: float) -> list[Request]:
        lanes, served, order = self._lanes(), dict(self._served), []
        while lanes:
            lane = min(lanes, key=lambda lane: self._rank(lane, served, now))
            order.append(lane.pop(0))
            served[_lane_key(order[-1])] += len(order[-1].token_ids) - order[-1].expected_cached
            lanes = [lane for lane in lanes if lane]
        return order

    def _lanes(self) -> list[list[Request]]:
        lanes: defaultdict[tuple[int, str], list[Request]] = defaultdict(list)
        for request in sorted(self.waiting, key=lambda request: request.place):
            lanes[_lane_key(request)].append(request)
        return list(lanes.values())

    def _rank(self, lane: list[Request], served: dict[tuple[int, str], float], now: float) -> tuple[float, ...]:
        head = lane[0]
        if now - _since(lane) >= self._age_s:
            return (0, *head.place)
        return (1, head.priority, served[_lane_key(head)], *head.place)


def _since(lane: Iterable[Request]) -> float:
    """Return the earliest time since which one of a lane waits."""
    return min((request.waiting_since for request in lane), default=math.inf)


def _lane_key(request: Request) -> tuple[int, str]:
    return (request.priority, request.tenant)
