"""Measures what an engine replica reports to the autoscaler: load, prefill throughput, and times to first token.
Never decides on replicas, and keeps only counts per second of requests that have their first token."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, asdict, dataclass, fields
from typing import Any

from engine.config import ResolvedConfig
from engine.protocol import (
    TERMINAL,
    Event,
    Finished,
    FinishReason,
    LoadSnapshot,
    PrefillCosts,
    PromptLogprobs,
    Scheduled,
)
from serve_app.settings.scaling import SignalSettings

ATTAINMENT_WINDOW_S = 30
"""How long a request's time to first token counts in the attainment."""
OFFERED_WINDOW_S = 20
"""The window in which offered prefill tokens are averaged."""
_THROUGHPUT_MEMORY_S = 60.0
"""After this much time with prefill work, the weight of earlier measurements is 1/e."""
_BEST_MEMORY_S = 3600.0
"""The same for the excess of the best throughput over the present one."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine's report. The field names are the keys of the deployment's autoscaling metrics, on both sides."""

    num_running: float
    num_waiting: float
    max_num_seqs: float
    queued_prefill_tokens: float
    """Prompt tokens that are still to be computed, of waiting and of partly computed requests."""
    prefill_tokens_per_s: float
    """The measured rate at which prompts are computed while any waits for it; see EngineSignals."""
    offered_prefill_tokens_per_s: float
    """The rate of arriving prompt tokens, without those found in the prefix cache, over OFFERED_WINDOW_S."""
    kv_pressure: float
    """The share of KV blocks that requests hold or admission reserves, 0 to 1; evictable blocks count as free."""
    kv_capacity_tokens: float
    """The capacity of all KV blocks, in tokens."""
    num_judged: float
    """The number of requests of the last ATTAINMENT_WINDOW_S that `ttft_attainment` judges."""
    ttft_attainment: float
    """The share of those with a first token in time; 1 if there are none. See EngineSignals."""
    num_waiting_outside: float = 0.0
    """Requests that wait in ingress replicas for a place with any engine, by what this engine last heard from each."""
    queued_prefill_s: float | None = None
    """Predicted seconds until `queued_prefill_tokens` are computed; None from an engine that does not predict."""
    offered_prefill_s_per_s: float | None = None
    """Predicted seconds of prefill that arrive each second, over the same window; None likewise."""
    asked_to_sleep: float = 0.0
    """1 if another model needs the engine's resources, and no request has come since that was said."""

    @property
    def queue_s(self) -> float:
        """Seconds until the queued prompts are computed: as predicted, or else by the measured rate."""
        if self.queued_prefill_s is not None:
            return self.queued_prefill_s
        return self.queued_prefill_tokens / self.prefill_tokens_per_s

    @property
    def offered_load(self) -> float:
        """Seconds of prefill that arrive each second, likewise. One engine can do 1."""
        if self.offered_prefill_s_per_s is not None:
            return self.offered_prefill_s_per_s
        return self.offered_prefill_tokens_per_s / self.prefill_tokens_per_s

    def as_stats(self) -> dict[str, float]:
        """Return the value for a deployment's `record_autoscaling_stats`: Serve takes numbers only."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_stats(cls, stats: Mapping[str, float]) -> EngineReport | None:
        """Read the report from metrics; None if one that every engine reports is missing, or one is not a number."""
        values = {spec.name: stats.get(spec.name, math.nan) for spec in fields(cls) if _is_due(spec, stats)}
        return cls(**values) if all(math.isfinite(value) for value in values.values()) else None


def _is_due(spec: Field[Any], stats: Mapping[str, float]) -> bool:
    """Whether a report has this field: engines that do not predict times, as those of an earlier version, lack some."""
    return spec.default is not None or spec.name in stats


@dataclass(slots=True)
class _Waiting:
    """A request that has no first token yet."""

    since_s: float
    prompt_tokens: int
    costs: PrefillCosts | None
    cached_tokens: int = 0


class _Window:
    """Sums what was counted in the last `seconds`, with one number per second."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._counts: deque[tuple[int, float]] = deque()

    def add(self, now_s: float, count: float) -> None:
        second = math.floor(now_s)
        if self._counts and self._counts[-1][0] == second:
            count += self._counts.pop()[1]
        self._counts.append((second, count))
        self._forget(second)

    def total(self, now_s: float) -> float:
        self._forget(math.floor(now_s))
        return sum(count for _, count in self._counts)

    def _forget(self, second: int) -> None:
        while self._counts and self._counts[0][0] <= second - self._seconds:
            self._counts.popleft()


class _Throughput:
    """Measures prefill tokens per second while some prompt waits; recent measurements count more.

    A stretch with less than one step's tokens is not measured: for a single short prompt it would only be the duration
    of a step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._since_s, self._stretch_tokens = 0.0, 0
        self._tokens, self._seconds = 0.0, 0.0
        self.best_tokens_per_s = 0.0
        """The highest recent mean, which is that of an engine with little other work; 0 at first."""

    def begin(self, now_s: float) -> None:
        """Begin a stretch: a prompt waits, and none did before."""
        self._since_s, self._stretch_tokens = now_s, 0

    def computed(self, now_s: float, tokens: int) -> None:
        self._stretch_tokens += tokens
        if self._stretch_tokens < self._step_tokens:
            return
        seconds = now_s - self._since_s
        kept = math.exp(-seconds / _THROUGHPUT_MEMORY_S)
        self._tokens = self._tokens * kept + self._stretch_tokens
        self._seconds = self._seconds * kept + seconds
        mean = self._tokens / self._seconds if self._seconds > 0 else 0.0
        self.best_tokens_per_s = mean + max(0.0, self.best_tokens_per_s - mean) * math.exp(-seconds / _BEST_MEMORY_S)
        self.begin(now_s)

    def tokens_per_s(self, default: float) -> float:
        """Return the rate, at least one, because queued tokens are divided by it."""
        return max(1.0, self._tokens / self._seconds) if self._seconds > 0 else default


class EngineSignals:
    """Follows every request of one engine up to its first token. All methods must be called on one event loop.

    Time to first token runs from `submitted` to the first token, or to the end of an answer without tokens. A request
    is judged when it gets there, when it has waited longer than allowed, or when it is refused for lack of room; the
    last two count as misses. A request that ends earlier without an answer is not judged.

    Prefill throughput is that of the engine under its present load: concurrent decoding, and waiting for memory or a
    seat, lower it. So queued tokens divided by it are the seconds until they are computed.
    """

    def __init__(
        self,
        settings: SignalSettings,
        *,
        max_num_seqs: int,
        step_tokens: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_num_seqs`: of all ranks. `step_tokens`: the most tokens of a step. `block_size`: the tokens of a KV
        block."""
        self._settings = settings
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}  # bounded by the engine's own limit
        self._throughput = _Throughput(step_tokens)
        self._offered = _Window(OFFERED_WINDOW_S)
        self._offered_s = _Window(OFFERED_WINDOW_S)
        self._judged = _Window(ATTAINMENT_WINDOW_S)
        self._in_time = _Window(ATTAINMENT_WINDOW_S)
        self._num_running = 0
        self._last_used_s = clock()
        self._asked_to_sleep = False
        self._outside: dict[str, tuple[float, int]] = {}  # ingress replica: (when heard of, waiting there)

    @classmethod
    def of(cls, settings: SignalSettings, config: ResolvedConfig) -> EngineSignals:
        """Return the signals of an engine with this configuration."""
        return cls(
            settings,
            max_num_seqs=config.num_seats,
            step_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
        )

    def submitted(
        self,
        request_id: str,
        prompt_tokens: int,
        ingress: str = "",
        num_waiting_outside: int = 0,
        costs: PrefillCosts | None = None,
    ) -> None:
        """Note a request that is about to be submitted; `num_waiting_outside` others wait in its ingress replica.
        `costs`: what prefill takes now, if the engine predicts it."""
        now_s = self._clock()
        self._outside[ingress] = (now_s, num_waiting_outside)
        if not self._waiting:
            self._throughput.begin(now_s)
        self._waiting[request_id] = _Waiting(now_s, prompt_tokens, costs)
        self._offered.add(now_s, prompt_tokens)
        if costs is not None:
            self._offered_s.add(now_s, costs.seconds(0, prompt_tokens))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Note that the engine is used: put it around each request."""
        self._num_running += 1
        self._asked_to_sleep = False
        try:
            yield
        finally:
            self._num_running -= 1
            self._last_used_s = self._clock()

    def idle_s(self) -> float | None:
        """Return the seconds since the last request; None while there is one."""
        return None if self._num_running else self._clock() - self._last_used_s

    def sleep_if_idle(self) -> bool:
        """Report from now on that the engine may end, until a request comes. False if there is one already."""
        self._asked_to_sleep = not self._num_running
        return self._asked_to_sleep

    def refused(self, request_id: str) -> None:
        """Count a request that the engine refused for lack of room: offered load that was not served."""
        if self._waiting.pop(request_id, None) is not None:
            self._judge(self._clock(), in_time=False)

    def observe(self, events: Iterable[Event]) -> None:
        """Take a batch of the engine's events, of any requests."""
        for event in events:
            waiting = self._waiting.get(event.request_id)
            if waiting is None:  # it has its first token already
                continue
            if isinstance(event, Scheduled):
                self._scheduled(waiting, event.cached_tokens)
            elif _gave_up(event):
                self.ended(event.request_id)
            elif not isinstance(event, PromptLogprobs):
                self._first_token(event.request_id, waiting)

    def ended(self, request_id: str) -> None:
        """Note that a request is over, for any reason. Idempotent; no effect after the first token."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and self._is_late(waiting, self._clock()):
            self._judge(self._clock(), in_time=False)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._throughput.tokens_per_s(self._settings.prefill_tokens_per_s)

    def report(self, load: LoadSnapshot) -> EngineReport:
        now_s = self._clock()
        judged, attainment = self._attainment(now_s)
        used_blocks = load.num_held_blocks + load.num_reserved_blocks
        predicts = load.prefill_costs is not None
        return EngineReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_outside=self._waiting_outside(now_s),
            max_num_seqs=self._max_num_seqs,
            queued_prefill_tokens=load.num_queued_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            offered_prefill_tokens_per_s=_mean(self._offered, now_s),
            kv_pressure=min(1.0, used_blocks / load.num_blocks),
            kv_capacity_tokens=load.num_blocks * self._block_size,
            num_judged=judged,
            ttft_attainment=attainment,
            queued_prefill_s=load.queued_prefill_s,
            offered_prefill_s_per_s=_mean(self._offered_s, now_s) if predicts else None,
            asked_to_sleep=float(self._asked_to_sleep),
        )

    def _waiting_outside(self, now_s: float) -> int:
        """Sum the waiting requests of ingress replicas that were recently heard of: one with a queue sends often."""
        self._outside = {name: news for name, news in self._outside.items() if now_s - news[0] < ATTAINMENT_WINDOW_S}
        return sum(count for _, count in self._outside.values())

    def _scheduled(self, waiting: _Waiting, cached_tokens: int) -> None:
        waiting.cached_tokens = cached_tokens
        self._offered.add(self._clock(), -cached_tokens)
        if waiting.costs is not None:
            self._offered_s.add(self._clock(), -waiting.costs.seconds(0, cached_tokens))

    def _first_token(self, request_id: str, waiting: _Waiting) -> None:
        now_s = self._clock()
        self._judge(now_s, in_time=not self._is_late(waiting, now_s))  # judged by the throughput before this request
        self._throughput.computed(now_s, waiting.prompt_tokens - waiting.cached_tokens)
        del self._waiting[request_id]

    def _judge(self, now_s: float, *, in_time: bool) -> None:
        self._judged.add(now_s, 1)
        self._in_time.add(now_s, int(in_time))

    def _is_late(self, waiting: _Waiting, now_s: float) -> bool:
        return now_s - waiting.since_s > self._allowed_s(waiting)

    def _allowed_s(self, waiting: _Waiting) -> float:
        """Return the allowed time: the target, or for a prompt that even an idle engine could not compute in time,
        twice its own computing time, because more replicas can only shorten its wait."""
        target_s, best = self._settings.ttft_target_ms / 1000, self._throughput.best_tokens_per_s
        alone_s = (waiting.prompt_tokens - waiting.cached_tokens) / best if best else 0.0
        return 2 * alone_s if alone_s > target_s else target_s

    def _attainment(self, now_s: float) -> tuple[float, float]:
        late = sum(self._is_late(waiting, now_s) for waiting in self._waiting.values())
        judged = self._judged.total(now_s) + late
        return judged, self._in_time.total(now_s) / judged if judged else 1.0


def _mean(offered: _Window, now_s: float) -> float:
    """Return the mean per second. Cached parts are subtracted when a prompt begins, so that a sum may be below 0."""
    return max(0.0, offered.total(now_s)) / OFFERED_WINDOW_S


def _gave_up(event: Event) -> bool:
    """Whether the request ended without an answer. An empty answer, or the scores of a prompt, count as an answer."""
    answered = isinstance(event, Finished) and event.reason is not FinishReason.ABORT
    return isinstance(event, TERMINAL) and not answered
