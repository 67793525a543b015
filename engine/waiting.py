"""Owns the requests that wait for a seat, and the order in which they are served: age, priority, fair share, arrival.
Never decides who fits: the planner walks this order, and looking changes nothing."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter

from engine.config import SchedulerConfig
from engine.request import Request

Line = tuple[int, str]
"""Requests of one priority and one tenant: they are served in the order of their places."""


class WaitingQueue:
    """First whoever waited for `priority_age_ms`, then the lowest priority number; among tenants of one priority the
    one that was served least, by virtual token counters (Sheng et al., OSDI 2024); for one tenant, in order of arrival.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._age_s = config.priority_age_ms / 1000
        self._answer_weight = config.answer_token_weight
        self._lines: dict[Line, dict[str, Request]] = {}
        self._served: dict[Line, float] = {}  # virtual tokens of every line that had requests since its class was idle
        self._live: Counter[Line] = Counter()  # requests of a line that wait or run
        self._num_waiting = 0
        self.num_preempted = 0
        """Of those that wait, requests that ran before."""
        self.shares = False
        """Several tenants or priorities are present, so that what each is served has to be counted. Kept, not worked
        out from `_served`, because every row of every step asks."""
        self.num_tokens = 0
        """Tokens of all waiting requests; how many of them the prefix cache holds is not known yet."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line.values()

    def find(self, request_id: str) -> Request | None:
        return next((line[request_id] for line in self._lines.values() if request_id in line), None)

    def enter(self, request: Request) -> None:
        """A request that is new to the engine; `leave` ends what this begins. A tenant that was away is not owed what
        others were served meanwhile: it starts where the least served of those present is."""
        line = _line_of(request)
        if not self._live[line]:
            present = [self._served[other] for other, live in self._live.items() if live and other[0] == line[0]]
            self._served[line] = max(self._served.get(line, 0.0), min(present, default=0.0))
        self._live[line] += 1
        self.shares = len(self._served) > 1
        self.add(request)

    def leave(self, request: Request) -> None:
        """The request has ended. Once nobody of its priority is left, there is nothing to share and all start over."""
        line = _line_of(request)
        self._live[line] -= 1
        if not any(live for other, live in self._live.items() if other[0] == line[0]):
            for other in [other for other in self._served if other[0] == line[0]]:
                del self._served[other], self._live[other]
            self.shares = len(self._served) > 1

    def add(self, request: Request) -> None:
        line = self._lines.setdefault(_line_of(request), {})
        behind = next(reversed(line.values()), None)
        line[request.request_id] = request
        if behind is not None and behind.place > request.place:  # preempted: back to its place
            self._lines[_line_of(request)] = {r.request_id: r for r in sorted(line.values(), key=attrgetter("place"))}
        self._num_waiting += 1
        self.num_preempted += request.was_scheduled
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> bool:
        """Whether it was waiting."""
        line = self._lines.get(_line_of(request), {})
        if line.pop(request.request_id, None) is None:
            return False
        if not line:
            del self._lines[_line_of(request)]
        self._num_waiting -= 1
        self.num_preempted -= request.was_scheduled
        self.num_tokens -= len(request.token_ids)
        return True

    def serve(self, request: Request, prompt_tokens: int = 0, answer_tokens: int = 0) -> None:
        """Count what was computed for a request against its tenant."""
        self._served[_line_of(request)] += prompt_tokens + self._answer_weight * answer_tokens

    def oldest_since(self) -> float | None:
        """Since when the request that has waited longest does, in monotonic seconds."""
        return min((_since(line.values()) for line in self._lines.values()), default=None)

    def in_order(self, now: float) -> Iterator[Request]:
        """Waiting requests as they should be admitted, if each of them is: a tenant's turn counts before its next."""
        if len(self._lines) < 2:
            yield from self
            return
        served = dict(self._served)
        lines = [list(line.values()) for line in self._lines.values()]
        heads = [(self._rank(line, 0, served, now), number, 0) for number, line in enumerate(lines)]
        heapq.heapify(heads)
        while heads:
            _, number, place = heads[0]
            line = lines[number]
            yield line[place]
            served[_line_of(line[place])] += len(line[place].token_ids)
            if place + 1 < len(line):
                heapq.heapreplace(heads, (self._rank(line, place + 1, served, now), number, place + 1))
            else:
                heapq.heappop(heads)

    def _rank(self, line: list[Request], place: int, served: dict[Line, float], now: float) -> tuple[float, ...]:
        head = line[place]
        if now - _since(islice(line, place, None)) >= self._age_s:
            return (0, *head.place)
        return (1, head.priority, served[_line_of(head)], *head.place)


def _since(line: Iterable[Request]) -> float:
    """When the oldest request of a line began to wait. Preempted ones stand in front of others that wait longer."""
    oldest = math.inf
    for request in line:
        oldest = min(oldest, request.waiting_since)
        if not request.was_scheduled:
            break
    return oldest


def _line_of(request: Request) -> Line:
    return (request.priority, request.tenant)
