"""Owns what an engine replica tells the autoscaler: its load, its prefill throughput, and how its first tokens do.
Never decides on replicas, and keeps nothing of a request beyond its first token but counts per second."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from pydantic import BaseModel, ConfigDict, Field

from engine.protocol import TERMINAL, Event, Finished, FinishReason, LoadSnapshot, PromptLogprobs, Scheduled

ATTAINMENT_WINDOW_S = 30
"""How long a request's time to first token counts in the attainment."""
OFFERED_WINDOW_S = 20
"""Over which offered prefill tokens are averaged."""
_THROUGHPUT_MEMORY_S = 60.0
"""After this much time with prefill work, what was measured before counts for 1/e."""
_BEST_MEMORY_S = 3600.0
"""The same, of how much better than now it was."""


class SignalSettings(BaseModel):
    """What the signals of an engine are measured against."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_target_ms: float = Field(
        default=2000,
        description="Time to first token that requests should have, in milliseconds. Lower it to scale up earlier. A "
        "prompt whose own computation takes longer may take twice that time, since more replicas cannot shorten it.",
        gt=0,
    )
    prefill_tokens_per_s: float = Field(
        default=1000,
        description="Prompt tokens a second that an engine is assumed to compute until it has measured its own rate.",
        gt=0,
    )


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine reports. Field names are the keys of the deployment's autoscaling metrics, on both sides."""

    num_running: float
    num_waiting: float
    max_num_seqs: float
    queued_prefill_tokens: float
    """Prompt tokens that are still to be computed, of waiting and of partly computed requests."""
    prefill_tokens_per_s: float
    """Measured rate at which prompts are computed while any waits for it; see EngineSignals."""
    offered_prefill_tokens_per_s: float
    """Prompt tokens that arrived, less those found in the prefix cache, over OFFERED_WINDOW_S."""
    kv_pressure: float
    """Share of KV blocks that requests hold or admission reserves; evictable blocks are free. 0 to 1."""
    kv_capacity_tokens: float
    """Tokens that all KV blocks hold together."""
    num_judged: float
    """Requests of the last ATTAINMENT_WINDOW_S that `ttft_attainment` judges."""
    ttft_attainment: float
    """Share of those whose first token was in time; 1 if there are none. See EngineSignals."""
    num_waiting_outside: float = 0.0
    """Requests that wait in ingress replicas for a place with any engine, as this engine last heard of each."""

    def as_stats(self) -> dict[str, float]:
        """What a deployment's `record_autoscaling_stats` returns."""
        return asdict(self)

    @classmethod
    def from_stats(cls, stats: Mapping[str, float]) -> EngineReport | None:
        """The report that these metrics carry; None if one of them is missing or not a number."""
        values = [stats.get(spec.name, math.nan) for spec in fields(cls)]
        return cls(*values) if all(math.isfinite(value) for value in values) else None


@dataclass(slots=True)
class _Waiting:
    """A request that has no first token yet."""

    since_s: float
    prompt_tokens: int
    cached_tokens: int = 0


class _Window:
    """The sum of what was counted in the last `seconds`, to a second; holds one number for each second."""

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
    """Prefill tokens per second, of stretches in which some prompt waits, recent ones counting more.

    A stretch with less than a step's tokens is not measured: it is a lone short prompt, and says how long a step takes.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._since_s, self._stretch_tokens = 0.0, 0
        self._tokens, self._seconds = 0.0, 0.0
        self.best_tokens_per_s = 0.0
        """The highest that the mean was, of late: that of the engine when it had little else to do. 0 at first."""

    def begin(self, now_s: float) -> None:
        """A prompt waits, and none did before."""
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
        """Never less than one: queued tokens are divided by it."""
        return max(1.0, self._tokens / self._seconds) if self._seconds > 0 else default


class EngineSignals:
    """Follows every request of one engine up to its first token. All methods are called on one event loop.

    Time to first token runs from `submitted` to the first token, or to the end of an answer without one. A request is
    judged when it gets there, once it has waited for longer than it may, or when it is refused for want of room:
    the last two are misses. A request that ends before and without an answer is not judged.

    Prefill throughput is that of the engine as it is: decoding beside it, waiting for memory or a seat all lower it, so
    that queued tokens divided by it are the seconds until they are computed.
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
        """`step_tokens`: most tokens of a step; `block_size`: tokens of a KV block."""
        self._settings = settings
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}  # as many as the engine takes
        self._throughput = _Throughput(step_tokens)
        self._offered = _Window(OFFERED_WINDOW_S)
        self._judged = _Window(ATTAINMENT_WINDOW_S)
        self._in_time = _Window(ATTAINMENT_WINDOW_S)
        self._outside: dict[str, tuple[float, int]] = {}  # ingress replica: when it was heard of, how many wait there

    def submitted(self, request_id: str, prompt_tokens: int, ingress: str = "", num_waiting_outside: int = 0) -> None:
        """A request is about to be given to the engine; `num_waiting_outside` others wait in its ingress replica."""
        now_s = self._clock()
        self._outside[ingress] = (now_s, num_waiting_outside)
        if not self._waiting:
            self._throughput.begin(now_s)
        self._waiting[request_id] = _Waiting(now_s, prompt_tokens)
        self._offered.add(now_s, prompt_tokens)

    def refused(self, request_id: str) -> None:
        """The engine had no room for it: offered load that nobody served."""
        if self._waiting.pop(request_id, None) is not None:
            self._judge(self._clock(), in_time=False)

    def observe(self, events: Iterable[Event]) -> None:
        """Take a batch of the engine's events, of any requests."""
        for event in events:
            waiting = self._waiting.get(event.request_id)
            if waiting is None:  # it has its first token: all that follows is of no interest here
                continue
            if isinstance(event, Scheduled):
                self._scheduled(waiting, event.cached_tokens)
            elif _gave_up(event):
                self.ended(event.request_id)
            elif not isinstance(event, PromptLogprobs):
                self._first_token(event.request_id, waiting)

    def ended(self, request_id: str) -> None:
        """The request is over, for whatever reason. Idempotent, and nothing to one that has its first token."""
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
        return EngineReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_waiting_outside=self._waiting_outside(now_s),
            max_num_seqs=self._max_num_seqs,
            queued_prefill_tokens=load.num_queued_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            offered_prefill_tokens_per_s=max(0.0, self._offered.total(now_s)) / OFFERED_WINDOW_S,
            kv_pressure=min(1.0, used_blocks / load.num_blocks),
            kv_capacity_tokens=load.num_blocks * self._block_size,
            num_judged=judged,
            ttft_attainment=attainment,
        )

    def _waiting_outside(self, now_s: float) -> int:
        """Of ingress replicas that were heard of lately: one where requests wait sends the next as soon as it may."""
        self._outside = {name: news for name, news in self._outside.items() if now_s - news[0] < ATTAINMENT_WINDOW_S}
        return sum(count for _, count in self._outside.values())

    def _scheduled(self, waiting: _Waiting, cached_tokens: int) -> None:
        waiting.cached_tokens = cached_tokens
        self._offered.add(self._clock(), -cached_tokens)

    def _first_token(self, request_id: str, waiting: _Waiting) -> None:
        now_s = self._clock()
        self._judge(now_s, in_time=not self._is_late(waiting, now_s))  # by what others took, not by its own time
        self._throughput.computed(now_s, waiting.prompt_tokens - waiting.cached_tokens)
        del self._waiting[request_id]

    def _judge(self, now_s: float, *, in_time: bool) -> None:
        self._judged.add(now_s, 1)
        self._in_time.add(now_s, int(in_time))

    def _is_late(self, waiting: _Waiting, now_s: float) -> bool:
        return now_s - waiting.since_s > self._allowed_s(waiting)

    def _allowed_s(self, waiting: _Waiting) -> float:
        """The target; twice its own time for a prompt that an idle engine could not compute by then: more replicas
        shorten its wait and nothing else."""
        target_s, best = self._settings.ttft_target_ms / 1000, self._throughput.best_tokens_per_s
        alone_s = (waiting.prompt_tokens - waiting.cached_tokens) / best if best else 0.0
        return 2 * alone_s if alone_s > target_s else target_s

    def _attainment(self, now_s: float) -> tuple[float, float]:
        late = sum(self._is_late(waiting, now_s) for waiting in self._waiting.values())
        judged = self._judged.total(now_s) + late
        return judged, self._in_time.total(now_s) / judged if judged else 1.0


def _gave_up(event: Event) -> bool:
    """It ended without an answer. A score of a prompt, or an answer that is empty, ends with neither."""
    answered = isinstance(event, Finished) and event.reason is not FinishReason.ABORT
    return isinstance(event, TERMINAL) and not answered
