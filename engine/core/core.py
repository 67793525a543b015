"""Owns one engine's step: plan, execute, apply. Long: the loop without and that with overlap are one.
Never blocks on anything but the executor, and never knows who reads its events. One thread at a time may use it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.config import ResolvedConfig
from engine.core.applier import Applier
from engine.core.capabilities import check_capabilities
from engine.core.engine_chunking import collect_in_chunks
from engine.core.padded_executor import PaddedExecutor
from engine.core.wall_times import Chunk, WallTimes, chunks_of, predict, split
from engine.kv_tiers import MoveKind, Tier
from engine.lockstep.shape import NO_STEP, StepShape
from engine.observer import ComputedStep, StepFacts
from engine.protocol import TERMINAL, ErrorCode, Event, FinishReason, LoadSnapshot, Scheduled, TimeCause
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.dry_run import shape_of
from engine.scheduling.planner import DeferReason, Plan
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepWork, work_of
from engine.scheduling.tier_index import TierIndex
from engine.speculation.draft_budget import MeasuredCosts
from engine.speculation.draft_model_policy import DraftModelPolicy
from engine.speculation.speculation import Speculation
from engine.step import (
    AdapterHost,
    Executor,
    ExecutorFatalError,
    ExecutorOutOfMemoryError,
    GrammarCompiler,
    RankStatus,
    RowFailure,
    RowKind,
    StepOutput,
    StepPlan,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A committed step. A row's results belong to its request only while the request's epoch is still the one kept
    here."""

    plan: Plan
    step: StepPlan
    epochs: tuple[int, ...]
    aside: tuple[str, ...]
    """Requests that had no row in it because they stood aside (overlap)."""
    started: float
    work: StepWork
    output: StepOutput | Exception | None
    """None: the output must still be collected. An exception: the launch failed."""


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A step that is planned, and changes nothing before it is committed."""

    now: float
    plan: Plan | None
    """None: what is in flight must be read first."""
    events: list[Event]
    """What came of requests that ended before it was planned."""
    shape: StepShape = NO_STEP
    """What the other ranks were told of it."""


class EngineCore:
    """Scheduler, block manager and executor of one engine.

    Every submitted request gets Scheduled, Token*, and exactly one Finished or Failed, from `step` or `abort`.
    """

    def __init__(
        self,
        executor: Executor,
        config: ResolvedConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.perf_counter,
        step_times: StepTimeModel | None = None,
        lockstep: bool = False,
    ) -> None:
        """`clock` returns monotonic seconds; tests advance it by hand. `stopwatch` does, too, and measures steps, by
        which loads from tiers are chosen. `step_times` predicts what steps take; it is needed where the config has
        targets, and learns from the steps. `lockstep`: every step has a shape that other ranks agreed to; see
        `propose`.

        Raises:
            ConfigError: the config needs something that this executor cannot do.
        """
        check_capabilities(config, executor.capabilities)
        assert executor.capabilities.lockstep or not lockstep, "this executor makes no exchanges with other ranks"
        self.config = config
        self._padded = PaddedExecutor(executor) if lockstep else None
        self._executor: Executor = self._padded or executor
        self._blocks = BlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
        self._step_times = step_times
        self._mover = executor.capabilities.kv_mover
        self._ranks = executor.capabilities.ranks
        self._tiers = None if self._mover is None else TierIndex(config, self._mover)
        self._scheduler = Scheduler(config, self._blocks, step_times, self._tiers)
        costs = None if step_times is None else MeasuredCosts.of(step_times.now.costs)
        self._draft_model_policy = DraftModelPolicy(config, costs) if config.has_draft_model else None
        self._speculation = Speculation(config, costs) if config.looks_up_drafts else self._draft_model_policy
        self._applier = Applier(
            self._scheduler, executor, most_forced=config.num_speculative_tokens, speculation=self._speculation
        )
        self._clock = clock
        self._wall_times = WallTimes()
        self._ended_at: float | None = None  # the last call, if there was work left
        self._timed: tuple[StepWork, float] | None = None  # of the last call: what it read back, and when it began
        self._proposal: _Proposal | None = None
        self._in_flight: _Launched | None = None  # with overlap: launched, but not read back yet
        self._only_launched: float | None = None  # when the last call began, if it read nothing back
        self._stopwatch = stopwatch
        self._read_back_at = -math.inf  # by the stopwatch: when the last step ended
        self._drafts_in_turn = config.overlap and config.num_speculative_tokens > 0  # rows may stand aside
        self._num_steps = 0
        self._num_preemptions = 0
        self._graph_uses: Counter[tuple[bool, str]] = Counter()
        self._deferred: DeferReason | None = None
        self._reserved_blocks = 0
        self._retrying = False  # the last step ran out of memory and is being retried with less prefill
        self._awaits_moves = False  # nothing could run in the last step, and loads that hold memory are under way
        self.last_step = StepFacts(0.0)
        """Facts about the last call of `step`."""

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        waits = bool(scheduler.waiting) and not self._awaits_moves
        stores = self._tiers is not None and self._tiers.has_stores
        return bool(scheduler.num_running or waits or self._in_flight or stores)

    @property
    def is_moving(self) -> bool:
        """Whether `step` has something to do once a move has ended, even without work."""
        return bool(self._scheduler.loading) or self.is_storing

    @property
    def is_storing(self) -> bool:
        """Whether blocks are on their way to lower tiers, or about to be."""
        return self._tiers is not None and (self._tiers.is_storing or self._tiers.has_stores)

    def on_move(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on any thread, when moves have ended: the next `step` reads them."""
        if self._mover is not None:
            self._mover.on_result(wake)

    @property
    def next_deadline(self) -> float | None:
        """The time at which `step` may have something to do even if there is no work."""
        loads = self._scheduler.loads
        times = (self._scheduler.deadlines.next, None if loads is None else loads.next_deadline)
        return min((time for time in times if time is not None), default=None)

    def load(self) -> LoadSnapshot:
        scheduler = self._scheduler
        costs = scheduler.prefill_costs()
        return LoadSnapshot(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting) + len(scheduler.preparing) + len(scheduler.loading),
            num_preparing=len(scheduler.preparing),
            num_waiting_preempted=scheduler.waiting.num_preempted,
            wait_reason=self._deferred.value if self._deferred and scheduler.waiting else None,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_blocks=self._blocks.num_blocks,
            num_held_blocks=self._blocks.num_held,
            num_evictable_blocks=self._blocks.num_evictable,
            num_reserved_blocks=self._reserved_blocks if scheduler.num_running else 0,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            reserve_ratio=scheduler.reserve_ratio,
            reserve_margin=scheduler.reserve_margin,
            step_times=None if self._step_times is None else self._step_times.correction,
            queued_prefill_s=None if costs is None else scheduler.queued_prefill_s(costs),
            prefill_costs=costs,
            idle_prefill_costs=scheduler.idle_prefill_costs(),
            graph_hits={name: count for (hit, name), count in self._graph_uses.items() if hit},
            graph_misses={name: count for (hit, name), count in self._graph_uses.items() if not hit},
            tiers=() if self._tiers is None or self._mover is None else self._tiers.loads(self._mover.sizes()),
            num_loading=len(scheduler.loading),
            rank_late_s=() if self._ranks is None else tuple(self._ranks.late_s()),
        )

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._executor.capabilities.grammars

    @property
    def adapters(self) -> AdapterHost | None:
        """See Capabilities.adapters."""
        return self._executor.capabilities.adapters

    @property
    def ranks(self) -> RankStatus | None:
        """See Capabilities.ranks."""
        return self._ranks

    def cached_digests(self, limit: int) -> list[bytes]:
        """Up to `limit` digests of the blocks in the prefix cache; see BlockManager.cached_digests."""
        return self._blocks.cached_digests(limit)

    def tier_digests(self, limit: int) -> dict[Tier, list[bytes]]:
        """Up to `limit` digests of blocks in each lower tier that are in no nearer one, heads of prefixes first."""
        return {} if self._tiers is None else self._tiers.digests(limit)

    def reset_prefix_cache(self) -> int:
        """Drop the cached prefixes that no request holds, and all that lower tiers have; return the number of
        blocks."""
        dropped = self._blocks.reset_cache()
        if self._mover is not None and self._tiers is not None:
            self._tiers.reset()
            dropped += self._mover.reset()
        return dropped

    def submit(
        self,
        request: Request,
        *,
        prepared: bool = True,
        handed_over: float | None = None,
        spent: Mapping[TimeCause, float] | None = None,
    ) -> list[Event]:
        """Queue a request that `create_request` made. It has no events before its first step.

        `handed_over`: when its caller submitted it, on this engine's clock; now if None. `spent`: what was spent on it
        before.

        A request that is not `prepared` keeps its place in the queue, but is not planned before `prepared` is called:
        part of its prompt's content, such as an image, is still being made.

        If predictions say that a deadline will pass before the prompt is computed, even by half the predicted time, the
        request fails at once, before it costs anything.
        """
        now = self._clock()
        self._awaits_moves = False
        ahead = len(self._scheduler.waiting) + len(self._scheduler.preparing), self._scheduler.num_queued_tokens
        since = now if handed_over is None else handed_over
        self._wall_times.open(request.request_id, since, prepared=prepared, ahead=ahead, spent=spent or {})
        self._scheduler.add(request, now, prepared=prepared)
        if (why := self._scheduler.why_late(request)) is None:
            return []
        return self._end(
            self._applier.fail(request, ErrorCode.DEADLINE_EXCEEDED, f"The request was ended at once: {why}.")
        )

    def prepared(self, request_id: str) -> list[Event]:
        """Let the request run from now on. Does nothing if it has ended."""
        self._awaits_moves = False
        self._scheduler.prepared(request_id)
        self._wall_times.prepared(request_id, self._clock())
        return []

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request in any state. Does nothing for unknown or finished ones: an abort may cross the last token."""
        request = self._scheduler.find(request_id)
        if request is None:
            return []
        return self._end(self._applier.finish(request, reason))

    def fail(self, request_id: str, message: str) -> list[Event]:
        """End a request whose preparation failed. Does nothing if it has ended."""
        request = self._scheduler.find(request_id)
        if request is None:
            return []
        return self._end(self._applier.fail(request, ErrorCode.PREPARATION_FAILED, message))

    def _end(self, event: Event) -> list[Event]:
        """Return a request's terminal event between two steps."""
        self._awaits_moves = False
        self._applier.take_ended()
        return self._close([event])

    # --- the step: one loop without and one with overlap, over the same parts -------------------------------------

    def propose(self) -> StepShape:
        """Plan the next step and return its shape, for other ranks to agree to. The next call must be `step`, with the
        shape that they agreed on. NO_STEP: this rank has nothing to launch now."""
        proposal, shape = self._plan(), NO_STEP
        if (plan := proposal.plan) is not None:
            passes, tokens = self._draft_model_policy.passes_for(plan) if self._draft_model_policy else (0, 0)
            shape = shape_of(plan, draft_passes=passes, draft_tokens=tokens)
        self._proposal = replace(proposal, shape=shape)
        return shape

    def _plan(self) -> _Proposal:
        now = self._clock()
        self._learn(now)
        self.last_step = StepFacts(now)
        events = self._end_late(now)
        self._scheduler.relegate(now)
        self._read_moves(now)
        self._retrying &= self._scheduler.num_running > 0  # otherwise no request of the failed step is left
        must_read = self._in_flight is not None and self._drafts_in_turn and self._scheduler.must_read_first
        return _Proposal(now, None if must_read else self._scheduler.plan(now), events)

    def step(self, joint: StepShape | None = None) -> list[Event]:
        """Compute one step and return its events; [] when nothing is live. With overlap, launch one step and return the
        events of the previous one. `joint`, in lockstep: the shape that the step must have, whatever this rank has to
        compute in it and whether that fails.

        Raises:
            ExecutorFatalError: the executor can run no further step; the caller must end all live requests.
        """
        proposal, self._proposal = self._proposal or self._plan(), None
        now, events = proposal.now, proposal.events
        assert (joint is None) == (self._padded is None), "steps in lockstep have a joint shape, and no others"
        if self._padded is not None and joint is not None:
            assert joint.covers(proposal.shape), f"the ranks agreed on {joint}, and this one needs {proposal.shape}"
            self._padded.begin(joint)
        launched, scheduled = self._launch(proposal.plan, now)
        if self._padded is not None:
            self._padded.pad()
        due = [launched]
        if self.config.overlap:
            due, self._in_flight = [self._in_flight], launched
            if launched is not None and launched.output is not None:  # it failed, so nothing may build on it
                due, self._in_flight = [*due, launched], None
        read = [step for step in due if step is not None]
        self._awaits_moves &= not read  # what was read may have made room
        in_hand = read or ([launched] if launched else [])
        chunks = [chunk for step in in_hand for chunk in chunks_of(step.plan.rows, step.epochs)]
        events = [*events, *scheduled, *(event for step in read for event in self._complete(step))]
        if len(read) == 1 and self.has_work and self.last_step.computed:
            self._time(read[0].work, now if launched else self._only_launched)
        self._only_launched = None if read else now
        self._account(now, in_hand, chunks if read else [chunk.in_flight for chunk in chunks])
        return self._close(events) if self._applier.take_ended() else events

    def _read_moves(self, now: float) -> None:
        """Take what the mover has done since the last step, and let requests that have waited for it wait for seats."""
        if self._mover is None or self._tiers is None or self._scheduler.loads is None:
            return
        back: list[Request] = []
        for result in self._mover.take_results():
            self._tiers.ended(result, now)
            if result.move.kind is MoveKind.LOAD:
                back += self._scheduler.loads.ended(result, now)
        for change in self._mover.take_changes():
            self._tiers.changed(change)
        self._tiers.forget_lost(self._blocks)
        for request in (*back, *self._scheduler.loads.late(now)):
            self._wall_times.loaded(request.request_id, now)

    def _move(self, step: StepPlan) -> None:
        """Begin a step's moves, before its rows may overwrite a block."""
        if self._mover is not None and (step.moves or step.tier_drops or step.cancelled):
            self._mover.cancel(step.cancelled)
            self._mover.begin(step.moves, step.tier_drops)

    def _account(self, began: float, steps: Sequence[_Launched], chunks: Sequence[Chunk]) -> None:
        """Say where the time since the last call ended has gone: to `steps`, whose prompts' part is `chunks`."""
        now = self._clock()
        seconds = now - (began if self._ended_at is None else self._ended_at)
        costs = predict([step.work for step in steps], chunks, self._step_times.now if self._step_times else None)
        took = split(seconds, costs, grammar_s=self.last_step.grammar_s)
        for_memory = self._deferred in (DeferReason.MEMORY, DeferReason.PREEMPTION)
        aside = [name for step in steps for name in step.aside]
        self._wall_times.step(took.beside_waiting(for_memory=for_memory), chunks, costs, now, aside)
        self._ended_at = now if self.has_work else None

    def _close(self, events: Sequence[Event]) -> list[Event]:
        """Add to terminal events where their requests' time went."""
        now = self._clock() if self._ended_at is None else self._ended_at
        return [
            replace(event, times=self._wall_times.close(event.request_id, now))
            if isinstance(event, TERMINAL)
            else event
            for event in events
        ]

    def _time(self, work: StepWork, began: float | None) -> None:
        """Note since when a step took its time: the call that read it back, or if that launched nothing, the call
        before, which launched it and read nothing. None: the call before read another step back meanwhile."""
        if began is not None:
            self._timed = work, began

    def _learn(self, now: float) -> None:
        """Tell the model how long the last call took: the time between two tokens of its streams, which is what users
        feel. Only if this call followed at once, and read back one step."""
        if self._step_times is not None and self._timed is not None:
            work, began = self._timed
            self._step_times.observe(work, now - began)
        self._timed = None

    def _launch(self, plan: Plan | None, now: float) -> tuple[_Launched | None, list[Event]]:
        """Commit a plan and start its step. Returns None if there is nothing to run, or if it ran out of memory and is
        planned again."""
        if plan is None:
            return None, []
        self._deferred, self._reserved_blocks = plan.deferred, plan.reserved_blocks
        self._awaits_moves = False
        if not plan.rows:
            if plan.has_moves or (self._tiers is not None and self._tiers.has_queued):
                self._move(self._scheduler.commit(plan, now))
            waits_again = self._note_loads(plan, now)  # and may run in the next step, for which no move will wake it
            self._awaits_moves = not waits_again and bool(self._scheduler.loading)
            goes_on = self._in_flight or self._awaits_moves or waits_again
            assert self._in_flight or not self._scheduler.num_running, "live requests, but nothing to run"
            assert goes_on or not self._scheduler.waiting, "nothing to wait for"
            return None, []
        aside = self._scheduler.standing_aside if self._drafts_in_turn else ()
        fresh = [row.request for row in plan.rows if not row.request.was_scheduled]
        for request in plan.preempted:
            self._wall_times.preempted(request.request_id, request.computed, now)
        step = self._scheduler.commit(plan, now)
        self._move(step)
        self._note_loads(plan, now)
        if self._draft_model_policy is not None:
            step = self._draft_model_policy.attach(plan, step)
        for row in plan.rows:
            if row.prefix_blocks is not None:
                self._wall_times.admitted(row.request.request_id, now)
        self._num_preemptions += len(plan.preempted)
        self.last_step.preempted = tuple(request.request_id for request in plan.preempted)
        self._executor.forget(self.last_step.preempted)
        events: list[Event] = [Scheduled(request.request_id, request.cached) for request in fresh]
        launched = self._start(plan, step, aside)
        if isinstance(launched.output, ExecutorOutOfMemoryError) and self._retry(plan, step):
            return None, events
        self._retrying = False
        return launched, events

    def _note_loads(self, plan: Plan, now: float) -> bool:
        """Note which requests a committed plan lets load, and which it lets load no more. Return whether any waits
        again: those, and requests whose blocks no tier has any more."""
        begun = [load.request.request_id for load in plan.loads if load.request.loading is not None]
        for request_id in begun:
            self._wall_times.loads(request_id, now)
        for request in plan.unloaded:
            self._wall_times.loaded(request.request_id, now)
        return bool(plan.unloaded) or len(begun) < len(plan.loads)

    def _start(self, plan: Plan, step: StepPlan, aside: tuple[str, ...]) -> _Launched:
        """Launch a step. An ordinary failure is kept as its output: it affects only the step's rows."""
        started = self._stopwatch()
        output: StepOutput | Exception | None = None
        try:
            if cuts := plan.rows[0].cuts:
                output = collect_in_chunks(self._executor, step, cuts)
            else:
                self._executor.launch(step)
        except ExecutorFatalError:
            raise
        except ExecutorOutOfMemoryError as error:
            logger.warning("step %d, %d tokens, ran out of memory: %s", step.step_id, step.num_tokens, error)
            output = error
        except Exception as error:
            logger.exception("step %d failed, %d rows", step.step_id, len(step.rows))
            output = error
        epochs = tuple(row.request.epoch for row in plan.rows)
        work = work_of(step)
        self._scheduler.begin(step, work)
        return _Launched(plan, step, epochs, aside, started, work, output)

    def _retry(self, plan: Plan, step: StepPlan) -> bool:
        """Roll back a step that ran out of memory, to plan it again. This happens once, and only if the step has
        prefill that can be reduced: decode rows alone would need the same memory again."""
        has_prefill = any(row.kind is not RowKind.DECODE for row in plan.rows)
        retry = not self._retrying and has_prefill
        if has_prefill:
            self._scheduler.ran_out(plan, again=self._retrying)
        if retry:
            self._scheduler.roll_back(plan, step)
        self._retrying = retry
        return retry

    def _complete(self, launched: _Launched) -> list[Event]:
        """Read a step back and apply it row by row. Rows whose request has ended or was preempted are discarded."""
        output = self._collect(launched)
        if isinstance(output, StepOutput):
            failed = dict(output.failed)
            self._scheduler.went_well(launched.plan)
        else:
            self._scheduler.lose(launched.step)
            output, failed = (
                StepOutput(launched.step.step_id, ()),
                dict.fromkeys(range(len(launched.epochs)), RowFailure(str(output))),
            )
        events: list[Event] = []
        rows = zip(launched.plan.rows, launched.step.rows, launched.epochs, strict=True)
        for number, (row, scheduled, epoch) in enumerate(rows):
            if row.request.epoch == epoch and number not in failed:
                events += self._applier.apply(row, scheduled, output, number)
                continue
            self._scheduler.discard(scheduled)
            if row.request.epoch == epoch:
                events.append(self._applier.fail(row.request, failed[number].code, failed[number].message))
        self.last_step.verified += self._applier.take_verified()
        self._draft()
        return events

    def _draft(self) -> None:
        """Draft for all decoding requests together. Drafts that grammars force are already present."""
        if self._speculation is not None:
            method = self._speculation.method
            for request, drafts in self._speculation.propose(self._scheduler.decoding.values()):
                if request.num_pending:
                    self._scheduler.await_token(request)
                else:
                    self._scheduler.draft(request, drafts, method)

    def _collect(self, launched: _Launched) -> StepOutput | Exception:
        output = launched.output
        try:
            output = self._executor.collect() if output is None else output
        except ExecutorFatalError:
            raise
        except Exception as error:
            logger.exception("step %d failed, %d rows", launched.step.step_id, len(launched.step.rows))
            self._read_back_at = self._stopwatch()
            return error
        if isinstance(output, StepOutput):
            self._num_steps += 1
            if output.graph is not None:
                self._graph_uses[output.graph.hit, output.graph.name] += 1
            self.last_step.grammar_s += output.grammar_s
            # With overlap, it was launched while the step before ran, and waited for that one.
            now = self._stopwatch()
            duration_s, self._read_back_at = now - max(launched.started, self._read_back_at), now
            predicted_s = self._step_times.now.seconds(launched.work) if self._step_times else None
            if self._tiers is not None:
                prefills = launched.plan.rows[-1].kind is not RowKind.DECODE
                self._tiers.rates.note_step(launched.step.num_tokens, duration_s, prefills=prefills)
            computed = ComputedStep.of(launched.step, len(self._scheduler.waiting), duration_s, predicted_s)
            self.last_step.computed += (computed,)
            if self.config.step_trace:
                logger.info("%s", computed.line)
        return output

    def _end_late(self, now: float) -> list[Event]:
        """End the requests whose deadline has passed."""
        return [
            self._applier.fail(
                request, ErrorCode.DEADLINE_EXCEEDED, f"The request was ended after {waited}, as its deadline says."
            )
            for request, waited in self._scheduler.deadlines.passed(now)
        ]

    def shutdown(self) -> None:
        self._executor.shutdown()
