"""Owns one engine's step: plan, execute, apply. The only place that turns results into events.
Never blocks on anything but the executor and never knows who listens; one thread at a time may use it."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable

from engine.block_manager import BlockManager
from engine.config import ResolvedConfig
from engine.planner import Plan, PlannedRow
from engine.protocol import ErrorCode, Event, Failed, Finished, FinishReason, LoadSnapshot, Scheduled, Token
from engine.request import Request
from engine.scheduler import Scheduler
from engine.step import (
    Executor,
    ExecutorFatalError,
    ExecutorOutOfMemoryError,
    RowKind,
    ScheduledRequest,
    StepOutput,
    StepPlan,
)
from engine.stopping import finish_reason, is_stop_token

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, block manager and executor of one engine.

    Every submitted request gets Scheduled, Token*, and exactly one Finished or Failed, from `step` or `abort`.
    """

    def __init__(
        self, executor: Executor, config: ResolvedConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives monotonic seconds; tests turn it by hand."""
        self.config = config
        self._executor = executor
        self._blocks = BlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self._scheduler = Scheduler(config, self._blocks)
        self._clock = clock
        self._num_steps = 0
        self._num_preemptions = 0
        self._retrying = False  # the last step ran out of memory and is being tried with less prefill
        self._deadlines: list[tuple[float, int, bool, str]] = []  # a heap: (when, ticket, also if it runs, request id)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.num_running or self._scheduler.waiting)

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            num_running=self._scheduler.num_running,
            num_waiting=len(self._scheduler.waiting),
            num_queued_tokens=self._scheduler.num_queued_tokens,
            num_blocks=self._blocks.num_blocks,
            num_held_blocks=self._blocks.num_held,
            num_evictable_blocks=self._blocks.num_evictable,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            reserve_ratio=self._scheduler.reserve_ratio,
        )

    def submit(self, request: Request) -> list[Event]:
        """Queue a request that `create_request` made. It has no events before its first step."""
        now = self._clock()
        self._scheduler.add(request, now)
        for running_too, timeout_s in ((False, request.queue_timeout_s), (True, request.timeout_s)):
            if timeout_s is not None:
                heapq.heappush(self._deadlines, (now + timeout_s, request.ticket, running_too, request.request_id))
        return []

    def abort(self, request_id: str) -> list[Event]:
        """End a request in any state. Unknown or finished ones are ignored: an abort may cross the last token."""
        request = self._scheduler.find(request_id)
        if request is None:
            return []
        return [self._finish(request, FinishReason.ABORT)]

    def step(self) -> list[Event]:
        """Compute one step and return its events; [] when nothing is live.

        Raises:
            ExecutorFatalError: the executor can run no further step; whoever owns the core ends what is live.
        """
        now = self._clock()
        events = self._end_late(now)
        plan = self._scheduler.plan(now)
        if not plan.rows:
            assert not self.has_work, "live requests, but nothing to run"
            return events
        fresh = [row.request for row in plan.rows if not row.request.was_scheduled]
        step = self._scheduler.commit(plan, now)
        self._num_preemptions += len(plan.preempted)
        self._executor.forget([request.request_id for request in plan.preempted])
        events += [Scheduled(request.request_id, request.cached) for request in fresh]
        output = self._execute(step)
        if isinstance(output, ExecutorOutOfMemoryError) and self._may_retry(plan):
            self._scheduler.roll_back(plan)
            return events
        self._retrying = False
        if isinstance(output, Exception):
            return events + [self._fail(row.request, ErrorCode.STEP_FAILED, str(output)) for row in plan.rows]
        failed, computed_at = dict(output.failed), self._clock()
        for i, (row, scheduled, tokens) in enumerate(zip(plan.rows, step.rows, output.sampled, strict=True)):
            if i in failed:
                events.append(self._fail(row.request, ErrorCode.STEP_FAILED, failed[i]))
            else:
                events += self._apply(row, scheduled, tokens, computed_at)
        return events

    def _end_late(self, now: float) -> list[Event]:
        """End the requests whose deadline has passed; that for the queue ends only those that never ran."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket, running_too, request_id = heapq.heappop(self._deadlines)
            request = self._scheduler.find(request_id)
            if request is None or request.ticket != ticket:  # ended before; the id may be another's by now
                continue
            if running_too or not request.was_scheduled:
                what = f"{request.timeout_s} s" if running_too else f"{request.queue_timeout_s} s in the queue"
                message = f"The request was ended after {what}, as its deadline says."
                events.append(self._fail(request, ErrorCode.DEADLINE_EXCEEDED, message))
        return events

    def _may_retry(self, plan: Plan) -> bool:
        """Once, and only where there is prefill to make smaller: decode rows alone would need the same memory again."""
        retry = not self._retrying and any(row.kind is not RowKind.DECODE for row in plan.rows)
        self._retrying = retry
        return retry

    def _execute(self, step: StepPlan) -> StepOutput | Exception:
        """Run the step. An ordinary failure is returned: it concerns the step's rows and nobody else."""
        started = time.perf_counter()
        try:
            self._executor.launch(step)
            output = self._executor.collect()
        except ExecutorFatalError:
            raise
        except ExecutorOutOfMemoryError as error:
            logger.warning("step %d, %d tokens, ran out of memory: %s", step.step_id, step.num_tokens, error)
            return error
        except Exception as error:
            logger.exception("step %d failed, %d rows", step.step_id, len(step.rows))
            return error
        self._num_steps += 1
        if self.config.step_trace:
            self._trace(step, started)
        return output

    def _trace(self, step: StepPlan, started: float) -> None:
        """One line a step: what it carried, and how long the executor took."""
        prefill = [len(row.token_ids) for row in step.rows if row.kind is not RowKind.DECODE]
        logger.info(
            "step=%d decode=%d prefill_requests=%d prefill_tokens=%d waiting=%d us=%d",
            step.step_id,
            len(step.rows) - len(prefill),
            len(prefill),
            sum(prefill),
            len(self._scheduler.waiting),
            (time.perf_counter() - started) * 1e6,
        )

    def _apply(
        self, row: PlannedRow, scheduled: ScheduledRequest, tokens: tuple[int, ...], computed_at: float
    ) -> list[Event]:
        request = row.request
        self._scheduler.advance(request, scheduled.end, computed_at)
        assert bool(tokens) == (row.kind is not RowKind.MIDDLE), f"{row.kind} row returned {len(tokens)} tokens"
        events: list[Event] = []
        for token_id in tokens:
            if is_stop_token(request, token_id):
                return [*events, self._finish(request, FinishReason.STOP, token_id)]
            request.token_ids.append(token_id)
            events.append(Token(request.request_id, token_id))
            if reason := finish_reason(request):
                return [*events, self._finish(request, reason)]
        return events

    def _finish(self, request: Request, reason: FinishReason, stop_token_id: int | None = None) -> Event:
        self._release(request)
        usage = request.usage(stop_token=stop_token_id is not None)
        return Finished(request.request_id, reason, usage, stop_token_id)

    def _fail(self, request: Request, code: ErrorCode, message: str) -> Event:
        self._release(request)
        return Failed(request.request_id, code, message)

    def _release(self, request: Request) -> None:
        self._scheduler.release(request)
        self._executor.forget([request.request_id])

    def shutdown(self) -> None:
        self._executor.shutdown()
