"""Owns the requests that wait for a seat, and the order in which they are served: by age, priority, fair share,
arrival.
Never decides which fit: the planner walks this order, and walking it changes nothing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Literal, assert_never

from engine.config import SchedulerConfig
from engine.protocol import num_pairs
from engine.scheduling.request import Request
from engine.scheduling.service import CountedTokens, Service
from engine.scheduling.sorted_list import SortedList
from engine.scheduling.tenant_shares import LaneKey, Shares

Rank = tuple[float, ...]
"""The rank of a lane among the others: the lowest is served first."""


class Lane:
    """The requests of one priority and one tenant, in the order of their places, with the lane's rank among the
    others."""

    __slots__ = ("age_key", "aged", "ages", "key", "rank", "ranked_at", "requests")

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        self.requests: SortedList[tuple[tuple[int, int], Request]] = SortedList()
        self.ages: SortedList[tuple[float, int, Request]] = SortedList()
        """The same requests by when they began to wait: places by time, and those of preempted requests, tell nothing
        of it."""
        self.aged = False
        self.rank: Rank | None = None  # None: not ranked yet
        self.ranked_at = 0.0
        """What its tenant had been served when it was ranked. That only grows, so it is never ahead of its rank."""
        self.age_key: tuple[float, LaneKey] = (math.inf, key)

    def __iter__(self) -> Iterator[Request]:
        for _, request in self.requests:
            yield request

    @property
    def since(self) -> float:
        """When the longest-waiting request began to wait."""
        return self.ages.first[0]


class WaitingQueue:
    """Requests that have waited for `priority_age_ms` come first, then the lowest priority number; among tenants of one
    priority the least served one; within a tenant, the order of their places: of arrival, or by time with a target for
    first tokens.

    Every change costs O(log n) comparisons. A lane whose rank may have changed is only noted, and ranked again at the
    next look. If only its tenant was served, it is ranked again once it is the first: each row of each step serves one.
    """

    def __init__(self, config: SchedulerConfig, service: Service | None = None) -> None:
        """`service`: the unit of shares; by default tokens."""
        self._age_s = config.priority_age_ms / 1000
        self._shares = Shares()
        self._service = service or CountedTokens(config.answer_token_weight)
        self._requests: dict[str, Request] = {}
        self._lanes: dict[LaneKey, Lane] = {}
        self._ranks: SortedList[tuple[Rank, Lane]] = SortedList()
        self._by_age: dict[bool, SortedList[tuple[float, LaneKey]]] = {False: SortedList(), True: SortedList()}
        self._changed: dict[LaneKey, Lane] = {}  # lanes whose ranks and ages must be updated
        self._last_place = self._newest = 0
        self._num_put_back = 0
        self.num_preempted = 0
        """Number of waiting requests that ran before."""
        self.num_tokens = 0
        """Tokens of all waiting requests, including those that the prefix cache may have."""
        self.num_new_tokens = self.num_new_pairs = 0
        """Tokens that the prefix cache did not have when their requests came, and the positions they attend to."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        for lane in self._lanes.values():
            yield from lane

    @property
    def shares(self) -> bool:
        """Whether `serve` must be called for the service of each request."""
        return self._shares.count

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose share is remembered, counted separately for each priority."""
        return len(self._shares)

    def find(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def enter(self, request: Request) -> None:
        """Queue a request that is new to the engine. `leave` is its counterpart."""
        self._last_place = max(self._last_place, request.place[0])
        self._newest = max(self._newest, request.arrival_index)
        self._shares.enter(_lane_key(request))
        self.add(request)

    def leave(self, request: Request) -> None:
        """Note that the request has ended."""
        self._shares.leave(_lane_key(request))

    def add(self, request: Request) -> None:
        """Let a request wait in its place."""
        key = _lane_key(request)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        lane.requests.add((request.place, request))
        lane.ages.add(_age(request))
        self._changed[key] = lane
        self._requests[request.request_id] = request
        self._count(request, 1)

    def put_back(self, request: Request, where: Literal["arrival", "front", "back"]) -> None:
        """Let a preempted request wait again: by its arrival, before all others, or behind all that have arrived."""
        self._num_put_back += 1
        match where:
            case "front":
                request.place = (-self._num_put_back, 0)
            case "back":
                request.place = (self._last_place, self._newest + self._num_put_back)
            case "arrival":
                pass  # keeps its place
            case _:
                assert_never(where)
        self.add(request)

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns whether it was waiting."""
        if self._requests.get(request.request_id) is not request:
            return False
        key = _lane_key(request)
        lane = self._lanes[key]
        lane.requests.remove((request.place, request))
        lane.ages.remove(_age(request))
        self._changed[key] = lane
        if not lane.requests:
            self._unrank(lane)
            del self._lanes[key], self._changed[key]
        del self._requests[request.request_id]
        self._count(request, -1)
        return True

    def _count(self, request: Request, sign: int) -> None:
        start, end = request.expected_cached, len(request.token_ids)
        self.num_preempted += sign * request.was_scheduled
        self.num_tokens += sign * end
        self.num_new_tokens += sign * (end - start)
        self.num_new_pairs += sign * num_pairs(start, end)

    def serve(self, request: Request, amount: float) -> None:
        """Count what was computed for a request against its tenant."""
        self._shares.serve(_lane_key(request), amount)

    def oldest_since(self) -> float | None:
        """Return when the longest-waiting request began to wait, in monotonic seconds."""
        if len(self._lanes) < 2:
            return min((lane.since for lane in self._lanes.values()), default=None)
        self._look_at_changed()
        return min(by_age.first[0] for by_age in self._by_age.values() if by_age)

    def in_order(self, now: float) -> Iterator[Request]:
        """Yield waiting requests in the order in which they should be admitted, as if each were admitted: a tenant's
        share is updated before its next request."""
        if len(self._lanes) < 2:
            yield from self
            return
        self._look(now)
        lanes = iter(self._ranks)
        first = next(lanes, None)
        under_way: list[tuple[Rank, _Walk]] = []  # lanes from which this walk has taken requests
        while first or under_way:
            if first and (not under_way or first[0] < under_way[0][0]):
                lane, first = first[1], next(lanes, None)
                walk = _Walk(lane, self._shares.served(lane.key), self._service)
                if self._was_served(lane) and walk.head is not None:  # others may go before it
                    heapq.heappush(under_way, (self._rank(walk.head, walk.since, walk.served, now), walk))
                    continue
            else:
                walk = heapq.heappop(under_way)[1]
            yield walk.take()
            if walk.head is not None:
                heapq.heappush(under_way, (self._rank(walk.head, walk.since, walk.served, now), walk))

    # --- the order among lanes ------------------------------------------------------------------------------------

    def _rank(self, head: Request, since: float, served: float, now: float) -> Rank:
        if now - since >= self._age_s:
            return (0, *head.place)
        return (1, head.priority, served, *head.place)

    def _look(self, now: float) -> None:
        """Update the order of the lanes."""
        self._look_at_changed()
        young, aged = self._by_age[False], self._by_age[True]
        while young and now - young.first[0] >= self._age_s:
            self._place(self._lanes[young.first[1]], aged=True)
        while aged and now - aged.last[0] < self._age_s:
            self._place(self._lanes[aged.last[1]], aged=False)
        while self._ranks and self._was_served(first := self._ranks.first[1]):
            self._place(first, aged=first.aged)

    def _was_served(self, lane: Lane) -> bool:
        """Whether a lane's tenant was served since the lane was ranked, and that counts."""
        return not lane.aged and self._shares.served(lane.key) != lane.ranked_at

    def _look_at_changed(self) -> None:
        for lane in self._changed.values():
            self._place(lane, aged=lane.aged)
        self._changed.clear()

    def _place(self, lane: Lane, *, aged: bool) -> None:
        self._unrank(lane)
        since, head = lane.since, lane.requests.first[1]
        lane.aged, lane.age_key, lane.ranked_at = aged, (since, lane.key), self._shares.served(lane.key)
        lane.rank = self._rank(head, since, lane.ranked_at, math.inf if aged else -math.inf)
        self._by_age[aged].add(lane.age_key)
        self._ranks.add((lane.rank, lane))

    def _unrank(self, lane: Lane) -> None:
        if lane.rank is not None:
            self._ranks.remove((lane.rank, lane))
            self._by_age[lane.aged].remove(lane.age_key)
            lane.rank = None


class _Walk:
    """A lane from which one walk through the queue takes requests."""

    def __init__(self, lane: Lane, served: float, service: Service) -> None:
        self._coming, self._ages = iter(lane), iter(lane.ages)
        self._service = service
        self._taken: set[Request] = set()
        self._oldest = next(self._ages, None)
        self.head = next(self._coming, None)
        """The next request; None at the end."""
        self.served = served

    @property
    def since(self) -> float:
        """When the longest-waiting request of the rest began to wait."""
        while self._oldest is not None and self._oldest[2] in self._taken:
            self._oldest = next(self._ages, None)
        return math.inf if self._oldest is None else self._oldest[0]

    def take(self) -> Request:
        taken = self.head
        assert taken is not None, "the lane has no more"
        self._taken.add(taken)
        self.served += self._service.prompt(taken.expected_cached, len(taken.token_ids))
        self.head = next(self._coming, None)
        return taken


def _age(request: Request) -> tuple[float, int, Request]:
    """Return since when a request waits, with what tells it from others. It does not change while it waits."""
    return request.waiting_since, request.arrival_index, request


def _lane_key(request: Request) -> LaneKey:
    return (request.priority, request.tenant)
