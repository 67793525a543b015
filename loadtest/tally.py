"""Owns the sums of a load: histograms of times, outcomes and tokens by point and kind, and their series by the second.
Never keeps a request. Tallies can be added up, so it does not matter which worker recorded what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtest.histogram import Histogram
from loadtest.slo import Goal
from loadtest.timeline import OK, OUTCOMES, REJECTED, Timeline

TIMES = ("ttft", "tpot", "itl", "e2e", "queue", "lag")
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
SERIES_TIMES = ("ttft", "itl")

Figures = dict[str, float]


def _histograms(names: tuple[str, ...]) -> dict[str, Histogram]:
    return {name: Histogram() for name in names}


@dataclass(slots=True)
class Cell:
    """Sums of the requests of one kind at one point of a load."""

    counts: Counter[str] = field(default_factory=Counter)
    """`offered`, `good`, each outcome, `retry_after`, `prompt_tokens`, `output_tokens`, `asked_tokens`."""
    window_tokens: float = 0.0
    """Output tokens that arrived within the window."""
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    times: dict[str, Histogram] = field(default_factory=lambda: _histograms(TIMES))

    def add(self, answer: Timeline, goal: Goal, asked_tokens: int) -> None:
        self.counts["offered"] += 1
        self.counts["good"] += goal.is_met(answer)
        self.counts["retry_after"] += answer.outcome == REJECTED and answer.retry_after
        self.counts["prompt_tokens"] += answer.prompt_tokens
        self.counts["output_tokens"] += answer.output_tokens
        self.counts[answer.outcome] += 1
        if answer.outcome == OK:
            self.counts["answered_prompt_tokens"] += answer.prompt_tokens
            self.counts["asked_tokens"] += asked_tokens
        if answer.error:
            self.errors[answer.error] += 1
        if answer.finish_reason:
            self.finish_reasons[answer.finish_reason] += 1
        for name, value in _times(answer):
            self.times[name].add(value)

    def merge(self, other: Cell) -> None:
        self.counts.update(other.counts)
        self.errors.update(other.errors)
        self.finish_reasons.update(other.finish_reasons)
        self.window_tokens += other.window_tokens
        for name, histogram in other.times.items():
            self.times[name].merge(histogram)

    def figures(self, window_s: float) -> Figures:
        """Return the figures that a report shows. A time without values is left out. `window_s` is explained in
        Tally."""
        offered = self.counts["offered"]
        found: Figures = {"offered": offered, "good": self.counts["good"], "window_s": window_s}
        found |= {outcome: self.counts[outcome] for outcome in OUTCOMES}
        if offered:
            found |= {f"{name}_share": self.counts[name] / offered for name in ("good", *OUTCOMES)}
        if self.counts[REJECTED]:
            found["retry_after_share"] = self.counts["retry_after"] / self.counts[REJECTED]
        if window_s:
            found["offered_per_s"] = offered / window_s
            found["goodput_per_s"] = self.counts["good"] / window_s
            found["output_tokens_per_s"] = self.window_tokens / window_s
        if self.counts["asked_tokens"]:
            found["prompt_length_ratio"] = self.counts["answered_prompt_tokens"] / self.counts["asked_tokens"]
        found |= {key: self.counts[key] for key in ("prompt_tokens", "output_tokens")}
        return found | dict(self._time_figures())

    def _time_figures(self) -> Iterator[tuple[str, float]]:
        for name, histogram in self.times.items():
            if histogram:
                yield f"{name}_mean_ms", histogram.mean
                values = histogram.percentiles(SHARES.values())
                yield from ((f"{name}_{share}_ms", value) for share, value in zip(SHARES, values, strict=True))

    def to_json(self) -> dict[str, Any]:
        counters = {name: dict(getattr(self, name)) for name in ("counts", "errors", "finish_reasons")}
        times = {name: histogram.to_json() for name, histogram in self.times.items()}
        return {**counters, "window_tokens": self.window_tokens, "times": times}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Cell:
        counters = {name: Counter(fields[name]) for name in ("counts", "errors", "finish_reasons")}
        times = {name: Histogram.from_json(histogram) for name, histogram in fields["times"].items()}
        return Cell(window_tokens=fields["window_tokens"], times=times, **counters)


def _times(answer: Timeline) -> Iterator[tuple[str, float]]:
    """Yield the times of an answer. A refusal has only the generator's lag: its speed says nothing about answers."""
    yield "lag", answer.lag_ms
    if answer.queue_ms is not None and answer.outcome != REJECTED:
        yield "queue", answer.queue_ms
    for name, value in (("ttft", answer.ttft_ms), ("tpot", answer.tpot_ms), ("e2e", answer.e2e_ms)):
        if value is not None:
            yield name, value
    yield from (("itl", gap) for gap in answer.gaps_ms())


@dataclass(slots=True)
class Second:
    """What happened in one second of a load."""

    counts: dict[str, float] = field(default_factory=dict)
    """`offered` and `good` count the requests that were due in this second; `tokens` arrived in it."""
    times: dict[str, Histogram] = field(default_factory=lambda: _histograms(SERIES_TIMES))
    """TTFT of the requests that were due in this second, and gaps that ended in it."""

    def count(self, name: str, more: float) -> None:
        self.counts[name] = self.counts.get(name, 0) + more

    def merge(self, other: Second) -> None:
        for name, more in other.counts.items():
            self.count(name, more)
        for name, histogram in other.times.items():
            self.times[name].merge(histogram)


@dataclass(slots=True)
class Tally:
    """Sums over the requests that were due within the windows of their points.

    A point is one load of a run (a rate, a number of clients). Its window begins after the warm-up and ends with the
    last arrival. Answers that end after the window are counted, but the window does not grow by them."""

    goal: Goal = field(default_factory=Goal)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    """By point and kind of request."""
    windows: dict[str, float] = field(default_factory=dict)
    """Length in seconds, by point."""
    seconds: dict[int, Second] = field(default_factory=dict)
    """The whole run by the second, including warm-ups and pauses between points."""

    def open_window(self, point: str, seconds: float) -> None:
        self.windows[point] = seconds

    def record(
        self, point: str, kind: str, answer: Timeline, window: tuple[float, float], asked_tokens: int = 0
    ) -> None:
        """Record an answer. `window` is the point's, in seconds from the beginning of the load, like the answer's
        stamps. `asked_tokens` is the intended length of the prompt."""
        self._record_seconds(answer)
        cell = self.cells.setdefault((point, kind), Cell())
        weight = answer.output_tokens / len(answer.arrivals) if answer.arrivals else 0.0
        cell.window_tokens += weight * sum(window[0] <= stamp < window[1] for stamp in answer.arrivals)
        if window[0] <= answer.due < window[1]:
            cell.add(answer, self.goal, asked_tokens)

    def _record_seconds(self, answer: Timeline) -> None:
        due = self._second(answer.due)
        due.count("offered", 1)
        due.count("good", self.goal.is_met(answer))
        if answer.ttft_ms is not None:
            due.times["ttft"].add(answer.ttft_ms)
        weight = answer.output_tokens / len(answer.arrivals) if answer.arrivals else 0.0
        for stamp in answer.arrivals:
            self._second(stamp).count("tokens", weight)
        for stamp, gap in zip(answer.arrivals[1:], answer.gaps_ms(), strict=True):
            self._second(stamp).times["itl"].add(gap)

    def _second(self, stamp: float) -> Second:
        at = int(stamp)
        if (found := self.seconds.get(at)) is None:  # not setdefault, which would make histograms for every token
            found = self.seconds[at] = Second()
        return found

    def merge(self, other: Tally) -> None:
        """Add another tally. Workers run the points at the same time, so a window is the longest of theirs, not the
        sum."""
        for key, cell in other.cells.items():
            self.cells.setdefault(key, Cell()).merge(cell)
        for point, seconds in other.windows.items():
            self.windows[point] = max(seconds, self.windows.get(point, 0.0))
        for at, second in other.seconds.items():
            self._second(at).merge(second)

    def take(self) -> Tally:
        """Remove and return what was recorded since the last call. The windows are included each time."""
        taken = Tally(self.goal, self.cells, dict(self.windows), self.seconds)
        self.cells, self.seconds = {}, {}
        return taken

    def kinds(self, point: str) -> list[str]:
        return [kind for its_point, kind in self.cells if its_point == point]

    def whole(self, point: str | None = None) -> Cell:
        """Sum up all kinds of one point, or of all points."""
        total = Cell()
        for (its_point, _), cell in self.cells.items():
            if point in (None, its_point):
                total.merge(cell)
        return total

    def figures(self, point: str, kind: str | None = None) -> Figures:
        cell = self.whole(point) if kind is None else self.cells.get((point, kind), Cell())
        return cell.figures(self.windows.get(point, 0.0))

    def to_json(self) -> dict[str, Any]:
        """The goal is left out: the receiver that merges the tally has its own."""
        cells = [[point, kind, cell.to_json()] for (point, kind), cell in self.cells.items()]
        seconds = [
            [at, dict(second.counts), {name: histogram.to_json() for name, histogram in second.times.items()}]
            for at, second in sorted(self.seconds.items())
        ]
        return {"cells": cells, "windows": self.windows, "seconds": seconds}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Tally:
        found = Tally(windows=dict(fields["windows"]))
        found.cells = {(point, kind): Cell.from_json(cell) for point, kind, cell in fields["cells"]}
        for at, counts, times in fields["seconds"]:
            histograms = {name: Histogram.from_json(histogram) for name, histogram in times.items()}
            found.seconds[at] = Second(counts, histograms)
        return found
