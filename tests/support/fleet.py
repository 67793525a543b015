"""Owns a fleet of engines on a virtual clock, scaled by the real Autoscaler on the real EngineSignals of each engine.
Never sleeps: an hour of it takes a second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from engine.protocol import LoadSnapshot, PrefillCosts, Scheduled, Token
from serve_app.scaling.autoscaler import Autoscaler, Decision, Observation
from serve_app.scaling.memory import StampedReport
from serve_app.scaling.signals import EngineSignals
from serve_app.settings.scaling import ScalingSettings, SignalSettings

TICK_S = 0.5
BLOCK_SIZE = 16
NUM_BLOCKS = 1000


@dataclass(frozen=True)
class Shape:
    """One engine, and the requests that come to the fleet, which are all alike."""

    prefill_tokens_per_s: float = 2000
    max_num_seqs: int = 32
    prompt_tokens: int = 1000
    answer_s: float = 8.0
    blocks_per_request: int = 20
    startup_s: float = 30.0
    predicts: bool = False
    """Whether engines report predicted seconds, too."""

    @property
    def costs(self) -> PrefillCosts | None:
        return PrefillCosts(1 / self.prefill_tokens_per_s, 0.0) if self.predicts else None


@dataclass
class _Job:
    name: str
    arrived_s: float
    left_tokens: float
    ends_s: float = math.inf


@dataclass
class SimulatedEngine:
    """Prefills its queue in order while seats are free, and holds a seat for `answer_s` after that."""

    name: str
    shape: Shape
    signals: EngineSignals
    queue: deque[_Job] = field(default_factory=deque)
    running: list[_Job] = field(default_factory=list)
    report: StampedReport | None = None

    def submit(self, job: _Job) -> None:
        self.signals.submitted(job.name, self.shape.prompt_tokens, costs=self.shape.costs)
        self.queue.append(job)

    def step(self, now_s: float) -> list[float]:
        """Run one tick; return the times to first token of prompts that were completed in it."""
        self.running = [job for job in self.running if job.ends_s > now_s]
        budget, done = self.shape.prefill_tokens_per_s * TICK_S, []
        while self.queue and budget > 0 and len(self.running) < self.shape.max_num_seqs:
            job = self.queue[0]
            taken = min(budget, job.left_tokens)
            job.left_tokens, budget = job.left_tokens - taken, budget - taken
            if job.left_tokens <= 0:
                done.append(self._first_token(self.queue.popleft(), now_s))
        return done

    def _first_token(self, job: _Job, now_s: float) -> float:
        self.signals.observe([Scheduled(job.name, 0), Token(job.name, 1)])
        job.ends_s = now_s + self.shape.answer_s
        self.running.append(job)
        return now_s - job.arrived_s

    def load(self) -> LoadSnapshot:
        blocks = min(NUM_BLOCKS, len(self.running) * self.shape.blocks_per_request)
        return load_snapshot(
            num_running=len(self.running),
            num_waiting=len(self.queue),
            num_queued_tokens=math.ceil(sum(job.left_tokens for job in self.queue)),
            num_held_blocks=blocks,
            costs=self.shape.costs,
        )


def load_snapshot(
    *,
    num_running: int = 0,
    num_waiting: int = 0,
    num_queued_tokens: int = 0,
    num_held_blocks: int = 0,
    num_evictable_blocks: int = 0,
    num_reserved_blocks: int = 0,
    costs: PrefillCosts | None = None,
) -> LoadSnapshot:
    return LoadSnapshot(
        num_running=num_running,
        num_waiting=num_waiting,
        num_preparing=0,
        num_waiting_preempted=0,
        wait_reason=None,
        num_queued_tokens=num_queued_tokens,
        num_blocks=NUM_BLOCKS,
        num_held_blocks=num_held_blocks,
        num_evictable_blocks=num_evictable_blocks,
        num_reserved_blocks=num_reserved_blocks,
        num_steps=0,
        num_preemptions=0,
        reserve_ratio=0.0,
        reserve_margin=0.5,
        queued_prefill_s=None if costs is None else costs.seconds(0, num_queued_tokens),
        prefill_costs=costs,
    )


class Fleet:
    """Plays Serve's part: replicas that take `startup_s` to start, a least-loaded router, and reports once a second."""

    def __init__(
        self, settings: ScalingSettings, *, min_replicas: int = 1, max_replicas: int = 20, shape: Shape | None = None
    ) -> None:
        self.shape = shape or Shape()
        self.bounds = (min_replicas, max_replicas)
        self.now_s, self.target = 0.0, min_replicas
        self.engines: list[SimulatedEngine] = []
        self.starting: list[float] = []
        self.at_router: deque[_Job] = deque()
        self.ttfts_s: list[tuple[float, float]] = []
        self.changes: list[tuple[float, Decision]] = []
        self.replica_seconds = 0.0
        self._autoscaler = Autoscaler(settings)
        self._names = iter(range(10**9))
        self._due = 0.0
        for _ in range(min_replicas):
            self._start_engine()

    def run(self, seconds: float, rate: Callable[[float], float]) -> Fleet:
        """Run for so long. `rate` gives the requests a second at a time since this call.
        They come evenly, as in a fluid."""
        begin = self.now_s
        while self.now_s < begin + seconds:
            self._due += rate(self.now_s - begin) * TICK_S
            self.tick()
        return self

    def tick(self) -> None:
        self.now_s += TICK_S
        while self.starting and self.starting[0] <= self.now_s:
            self.starting.pop(0)
            self._start_engine()
        for engine in self.engines:
            self.ttfts_s += [(self.now_s, ttft) for ttft in engine.step(self.now_s)]
            if self.now_s % 1 == 0:
                engine.report = StampedReport(self.now_s, engine.signals.report(engine.load()))
        self._arrive()  # after the step: a prompt takes its full time
        self._scale()
        self.replica_seconds += len(self.engines) * TICK_S

    def _arrive(self) -> None:
        while self._due >= 1:
            self._due -= 1
            job = _Job(f"request-{next(self._names)}", self.now_s, self.shape.prompt_tokens)
            self.at_router.append(job)
        while self.at_router and self.engines:
            engine = min(self.engines, key=lambda one: len(one.queue) + len(one.running))
            engine.submit(self.at_router.popleft())

    def _start_engine(self) -> None:
        signals = EngineSignals(
            SignalSettings(),
            max_num_seqs=self.shape.max_num_seqs,
            step_tokens=512,
            block_size=BLOCK_SIZE,
            clock=lambda: self.now_s,
        )
        self.engines.append(SimulatedEngine(f"engine-{next(self._names)}", self.shape, signals))

    def _scale(self) -> None:
        low, high = self.bounds
        running = {engine.name: engine.report for engine in self.engines}
        seen = Observation(self.now_s, running, self.target, len(self.at_router), low, high)
        decision = self._autoscaler.decide(seen)
        if decision.num_replicas != self.target:
            self.changes.append((self.now_s, decision))
        self.target = decision.num_replicas
        while len(self.engines) + len(self.starting) < self.target:
            self.starting.append(self.now_s + self.shape.startup_s)
        while len(self.engines) + len(self.starting) > self.target:
            self._remove_one()

    def _remove_one(self) -> None:
        """Stop a replica, as Serve does one that is starting first; what its engine held is given to the others."""
        if self.starting:
            self.starting.pop()
            return
        gone = self.engines.pop()
        self.at_router.extend(replace(job, left_tokens=self.shape.prompt_tokens) for job in gone.queue)

    @property
    def targets(self) -> list[int]:
        return [self.bounds[0], *(decision.num_replicas for _, decision in self.changes)]

    @property
    def num_queued(self) -> int:
        return len(self.at_router) + sum(len(engine.queue) for engine in self.engines)

    def worst_ttft_s(self, since_s: float = 0.0) -> float:
        return max((ttft for at, ttft in self.ttfts_s if at >= since_s), default=0.0)


def direction_changes(numbers: Iterable[int]) -> int:
    """Count how often a series that went up goes down, or the other way round."""
    rises = [after > before for before, after in pairwise(numbers) if after != before]
    return sum(one != other for one, other in pairwise(rises))
