"""Owns one simulated engine replica: the real EngineCore, steps that take simulated time, and its reports.
Never chooses what runs or where: the core and the router do."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from engine.config import ResolvedConfig
from engine.core.calibration import calibrate
from engine.core.core import EngineCore
from engine.protocol import (
    TERMINAL,
    EngineError,
    ErrorCode,
    Event,
    LoadSnapshot,
    RequestRejected,
    Scheduled,
    Submission,
)
from engine.scheduling.request import create_request
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepCosts
from loadtest.sim.executor import Noise, TimedExecutor
from loadtest.sim.step_time import StepTime
from serve_app.routing.stats import encode
from serve_app.scaling.memory import StampedReport
from serve_app.scaling.signals import EngineSignals
from serve_app.settings.scaling import SignalSettings


class Sink(Protocol):
    """The reader of a request's events."""

    def receive(self, event: Event, at_s: float) -> None:
        """Take an event. `at_s` is when its step began for Scheduled, and when its step ended for all others."""
        ...

    def fail(self, error: EngineError) -> None:
        """The replica is gone; no event follows."""
        ...


class Replica:
    """Runs steps while it has work. A step is planned and computed when it begins. Its events are delivered when it
    ends, and requests that arrive meanwhile are in the next step's plan."""

    def __init__(
        self,
        name: str,
        zone: int,
        config: ResolvedConfig,
        step_time: StepTime,
        ends: Mapping[str, int],
        signals: SignalSettings,
        on_empty: Callable[[Replica], None] = lambda replica: None,
        *,
        noise: Noise | None = None,
        believed: StepCosts | None = None,
    ) -> None:
        """`ends` is explained in TimedExecutor. `on_empty` is called when the last request of a draining replica has
        left. `believed`: see Scenario."""
        self.name, self.zone = name, zone
        self.config = config
        self._loop = asyncio.get_running_loop()
        self.noise = noise or Noise()
        self._executor = TimedExecutor(step_time, ends, self.noise)
        step_times = _step_times(step_time, self.noise, config, believed) if config.targets.any else None
        self._core = EngineCore(self._executor, config, clock=self._loop.time, step_times=step_times)
        self._signals = EngineSignals(
            signals,
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            clock=self._loop.time,
        )
        self._sinks: dict[str, Sink] = {}
        self._arrivals = count()
        self._step: asyncio.Handle | None = None
        self._on_empty = on_empty
        self.is_draining = False
        self.num_steps, self.num_computed_tokens, self.num_preemptions, self.busy_s = 0, 0, 0, 0.0

    @property
    def num_ongoing(self) -> int:
        """The number of its requests, running and waiting."""
        return len(self._sinks)

    def submit(self, submission: Submission, sink: Sink, num_waiting_outside: int = 0) -> None:
        """Take a request. Its events go to `sink` until the terminal one, or until `abort`.

        Raises:
            RequestRejected: as by the engine: the request can never fit, or the queue is full.
        """
        limit = self.config.max_num_seqs + self.config.max_queued_requests
        if self.is_draining:
            raise RequestRejected(ErrorCode.DRAINING, f"{self.name} is draining.")
        if len(self._sinks) >= limit:
            raise RequestRejected(ErrorCode.QUEUE_FULL, f"{self.name} holds {limit} requests.", limit=limit)
        request = create_request(submission, self.config, next(self._arrivals))
        num_tokens = len(submission.prompt_token_ids)
        costs = self._core.load().prefill_costs
        self._signals.submitted(submission.request_id, num_tokens, "ingress", num_waiting_outside, costs)
        self._sinks[submission.request_id] = sink
        self._core.submit(request)
        if self._step is None:  # requests that arrive at the same moment are in the same step
            self._step = self._loop.call_soon(self._begin_step)

    def abort(self, request_id: str) -> None:
        """Abort a request whose reader has left. Does nothing if the request has ended."""
        if self._sinks.pop(request_id, None) is not None:
            self._core.abort(request_id)
            self._signals.ended(request_id)
            self._check_empty()

    def _begin_step(self) -> None:
        executor = self._executor
        executor.seconds = 0.0
        events = self._core.step()
        facts = self._core.last_step
        self.num_steps += 1
        self.num_computed_tokens += facts.num_tokens
        self.num_preemptions += len(facts.preempted)
        self.busy_s += executor.seconds
        self._step = self._loop.call_later(executor.seconds, self._end_step, events, self._loop.time())

    def _end_step(self, events: list[Event], began_s: float) -> None:
        self._step, now_s = None, self._loop.time()
        self._signals.observe(events)
        sinks = self._sinks
        for event in events:
            sink = sinks.get(event.request_id)
            if sink is None:  # its reader left while the step ran
                continue
            if isinstance(event, TERMINAL):
                del sinks[event.request_id]
            sink.receive(event, began_s if isinstance(event, Scheduled) else now_s)
        if self._core.has_work:
            self._begin_step()
        if self.is_draining:
            self._check_empty()

    # --- the end of it ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no more requests, and finish the present ones."""
        self.is_draining = True
        self._check_empty()

    def _check_empty(self) -> None:
        if self.is_draining and not self._sinks:
            self._on_empty(self)

    def stop(self, code: ErrorCode) -> None:
        """End at once: all present requests fail with `code`, and the running step is lost."""
        if self._step is not None:
            self._step.cancel()
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink.fail(EngineError(code, f"{self.name} is gone."))

    # --- what it tells ----------------------------------------------------------------------------------------------

    def load(self) -> LoadSnapshot:
        """Return the load as of the last step, including the running one."""
        return self._core.load()

    def report(self) -> StampedReport:
        return StampedReport(self._loop.time(), self._signals.report(self.load()))

    def routing_stats(self, published_blocks: int) -> dict[str, Any]:
        return encode(
            self.load(),
            self._core.cached_digests(published_blocks),
            limit=published_blocks,
            prefill_tokens_per_s=self._signals.prefill_tokens_per_s,
            taken_at_s=self._loop.time(),
        )


def _step_times(step_time: StepTime, noise: Noise, config: ResolvedConfig, believed: StepCosts | None) -> StepTimeModel:
    """Measure the simulated machine as an engine measures its own at the first start, unless it has kept costs."""
    if believed is not None:
        return StepTimeModel(believed, deviation=noise.deviation)
    executor = TimedExecutor(step_time, defaultdict(lambda: config.max_model_len), noise)
    found = calibrate(executor, config, clock=lambda: executor.seconds)
    return StepTimeModel(found.costs, deviation=found.deviation)
