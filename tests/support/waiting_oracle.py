"""Owns the order of a queue by definition: everything that waits is looked at each time, and nothing is forgotten.
Never fast: engine/scheduling/waiting.py is to say the same."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from engine.scheduling.request import Request


class PlainQueue:
    def __init__(self, age_s: float, answer_weight: float) -> None:
        self._age_s, self._answer_weight = age_s, answer_weight
        self.waiting: list[Request] = []
        self._live: Counter[tuple[int, str]] = Counter()
        self._served: defaultdict[tuple[int, str], float] = defaultdict(float)

    def enter(self, request: Request) -> None:
        line = _line(request)
        if not self._live[line]:
            present = [self._served[other] for other, live in self._live.items() if live and other[0] == line[0]]
            self._served[line] = max(self._served[line], min(present, default=0.0))
        self._live[line] += 1
        self.waiting.append(request)

    def leave(self, request: Request) -> None:
        self._live[_line(request)] -= 1
        if not any(live for line, live in self._live.items() if line[0] == request.priority):
            for line in [line for line in self._served if line[0] == request.priority]:
                del self._served[line]

    def serve(self, request: Request, prompt_tokens: int, answer_tokens: int) -> None:
        self._served[_line(request)] += prompt_tokens + self._answer_weight * answer_tokens

    def oldest_since(self) -> float | None:
        return min((_since(line) for line in self._lines()), default=None)

    def in_order(self, now: float) -> list[Request]:
        lines, served, order = self._lines(), dict(self._served), []
        while lines:
            line = min(lines, key=lambda line: self._rank(line, served, now))
            order.append(line.pop(0))
            served[_line(order[-1])] += len(order[-1].token_ids)
            lines = [line for line in lines if line]
        return order

    def _lines(self) -> list[list[Request]]:
        lines: defaultdict[tuple[int, str], list[Request]] = defaultdict(list)
        for request in sorted(self.waiting, key=lambda request: request.place):
            lines[_line(request)].append(request)
        return list(lines.values())

    def _rank(self, line: list[Request], served: dict[tuple[int, str], float], now: float) -> tuple[float, ...]:
        head = line[0]
        if now - _since(line) >= self._age_s:
            return (0, *head.place)
        return (1, head.priority, served[_line(head)], *head.place)


def _since(line: Iterable[Request]) -> float:
    """Of those that ran before, and the first one behind them that did not."""
    return min(_told_by(line), default=math.inf)


def _told_by(line: Iterable[Request]) -> Iterator[float]:
    for request in line:
        yield request.waiting_since
        if not request.was_scheduled:
            return


def _line(request: Request) -> tuple[int, str]:
    return (request.priority, request.tenant)
