"""Owns the queues, and what executing a plan does to them: admission, growth, preemption, release.
Never chooses: `engine.scheduling.planner` does, from a view of these queues, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from engine.config import ResolvedConfig
from engine.multimodal_inputs import shift_at
from engine.protocol import DraftMethod
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.chunk_policy import ChunkRule
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.encoder_cache import EncoderCache
from engine.scheduling.forecast import Forecast
from engine.scheduling.planner import Plan, PlannedRow, View, make_plan
from engine.scheduling.prefill_limit import PrefillLimit
from engine.scheduling.request import Request
from engine.scheduling.reservation import ReserveRatio
from engine.scheduling.state_slots import Snapshots, StateSlots
from engine.scheduling.waiting import WaitingQueue
from engine.step import RowKind, ScheduledRequest, StateUse, StepPlan


class Scheduler:
    """Waiting, prefilling and decoding requests over one block manager.

    A request waits, prefills chunk by chunk, decodes, and is released. A preemption gives its memory back and puts it
    among the waiting again, to compute prompt and answer so far once more; nothing is sampled twice. Its cursor
    `scheduled` moves when a plan is committed, `computed` when the results are in.
    """

    def __init__(self, config: ResolvedConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._ratio = ReserveRatio(config.scheduler)
        self._forecast = Forecast(config) if config.scheduler.reserve_mode == "learned" else None
        self._states = StateSlots() if config.recurrent_state else None
        self._snapshots = Snapshots(config.scheduler.state_snapshots) if config.recurrent_state else None
        self.encoder = EncoderCache(config.encoder_cache_tokens) if config.inputs else None
        self._promised = 0  # blocks that admitted requests may still allocate in their lives
        self._next_step_id = 0
        self._last_decode = 0.0
        self._prefill_limit = PrefillLimit(config.max_prefill_tokens, config.block_size)
        self.waiting = WaitingQueue(config.scheduler)
        self.deadlines = Deadlines()
        self.preparing: dict[str, Request] = {}
        """Not ready to be planned: their prompts are still being made. They keep their place in the queue."""
        # Each in the order in which it is served: dicts for O(1) removal in the middle.
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        """Requests whose whole prompt is scheduled."""

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are in no step yet. Prefix hits of waiting requests, not known yet, count as work."""
        return self.waiting.num_tokens + sum(r.target - r.scheduled for r in self.prefilling.values())

    @property
    def reserve_ratio(self) -> float:
        return self._ratio.value

    @property
    def reserve_margin(self) -> float:
        return self._forecast.margin if self._forecast else 0.0

    def add(self, request: Request, now: float, *, prepared: bool = True) -> None:
        """Queue a request. Its deadlines count from now on."""
        request.waiting_since = now
        self.waiting.enter(request)
        self.deadlines.add(request, now)
        if not prepared:
            self.waiting.remove(request)
            self.preparing[request.request_id] = request

    def prepared(self, request_id: str) -> None:
        """The request may be planned from now on, in the place that its arrival gave it."""
        if request := self.preparing.pop(request_id, None):
            self.waiting.add(request)

    def find(self, request_id: str) -> Request | None:
        for running in (self.decoding, self.prefilling, self.preparing):
            if request_id in running:
                return running[request_id]
        return self.waiting.find(request_id)

    def plan(self, now: float) -> Plan:
        """The next step, at `now` in monotonic seconds; empty when nothing can run. Changes nothing."""
        view = View(
            waiting=self.waiting,
            prefilling=self.prefilling,
            decoding=self.decoding,
            blocks=self._blocks,
            snapshots=self._snapshots,
            promised_blocks=self._promised,
            ratio=self._ratio.value,
            now=now,
            prefill_limit=self._prefill_limit.value,
            last_decode=self._last_decode,
            num_queued_tokens=self.num_queued_tokens,
            encoder=self.encoder,
            forecast=self._forecast,
        )
        return make_plan(view, self._config)

    # --- commit: moves requests and takes blocks exactly as planned -----------------------------------------------

    def commit(self, plan: Plan, now: float) -> StepPlan:
        for request in plan.preempted:
            self._preempt(request, now)
        for request in plan.overtaken:
            request.num_overtakes += 1
        if not self._prefill_limit.is_whole and any(row.kind is not RowKind.DECODE for row in plan.rows):
            self._prefill_limit.begin()
        for row in plan.rows:
            if row.prefix_blocks is not None:  # all claims first: an allocation below must not evict them
                self._admit(row.request, row.prefix_blocks)
        self._keep_ratio(plan)
        moves = self._states.take_moves() if self._states else ()
        restores = [self._snapshot(row) for row in plan.rows]  # all of them first: a save below may overwrite one
        rows = tuple(self._schedule(row, restore, now) for row, restore in zip(plan.rows, restores, strict=True))
        step = StepPlan(self._next_step_id, rows, moves)
        if self.encoder is not None:
            encodes = self.encoder.encodes(
                (row.request, done.inputs) for row, done in zip(plan.rows, rows, strict=True)
            )
            step = replace(step, dropped=self.encoder.take_dropped(), encodes=encodes)
        self._next_step_id += 1
        return step

    def _keep_ratio(self, plan: Plan) -> None:
        if self._forecast is not None:
            self._forecast.after_step(preempted=len(plan.preempted))
        if plan.preempted:
            self._ratio.after_preemption(self.decoding.values())
        else:
            kinds = {row.kind is RowKind.DECODE for row in plan.rows}
            self._ratio.after_step(decoded=True in kinds, prefilled=False in kinds)

    def _admit(self, request: Request, prefix: tuple[int, ...]) -> None:
        self.waiting.remove(request)
        self.prefilling[request.request_id] = request
        if self._forecast is not None:
            self._forecast.admit(request, sum(map(self._blocks.is_held, prefix)))
        self._blocks.claim(prefix)
        request.block_ids = prefix
        request.num_published = len(prefix)
        request.computed = request.scheduled = len(prefix) * self._blocks.block_size
        if not request.was_scheduled:
            request.cached = request.computed
            if self.waiting.shares:
                self.waiting.serve(request, prompt_tokens=request.prompt_len - request.cached)
        request.target = len(request.token_ids)
        self._promised += self._still_promised(request)
        if self._states is not None:
            self._states.take(request.request_id)

    def _still_promised(self, request: Request) -> int:
        return self._blocks.blocks_for(request.lifetime_tokens) - len(request.block_ids)

    def _schedule(self, row: PlannedRow, restore: int | None, now: float) -> ScheduledRequest:
        request, end = row.request, row.start + row.num_tokens
        assert row.start == request.scheduled, f"{request.request_id}: at {request.scheduled}, not {row.start}"
        self._grow(request, end)
        sampling = None if row.kind is RowKind.MIDDLE else request.next_sampling()
        scheduled = ScheduledRequest(
            request.request_id,
            row.kind,
            row.start,
            request.next_tokens(row.num_tokens),
            request.block_ids,
            sampling,
            None if row.kind is RowKind.DECODE else request.scoring(row.num_tokens),
            self._state_use(row, restore) if self._states is not None else None,
            request.pool_from(row.num_tokens) if request.pooling is not None else None,
            request.answer() if sampling and sampling.controls and sampling.controls.looks_back else (),
            self.encoder.begin(request, row.start, end) if self.encoder and request.inputs else (),
            shift_at(request.placed_inputs, row.start) if request.inputs else 0,
            request.adapter,
        )
        request.scheduled = end
        request.num_pending += sampling is not None
        request.was_scheduled = True
        request.waiting_since = now
        if row.kind is RowKind.DECODE:
            self._last_decode = now
        elif row.kind is RowKind.LAST:
            self._promote(request, now)
        return scheduled

    def _promote(self, request: Request, now: float) -> None:
        if not self.decoding:
            self._last_decode = now
        self.decoding[request.request_id] = self.prefilling.pop(request.request_id)

    def _grow(self, request: Request, num_tokens: int) -> None:
        missing = self._blocks.blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids += self._blocks.allocate(missing)
            self._promised -= missing
            if self._forecast is not None:
                self._forecast.follow(request)

    def _snapshot(self, row: PlannedRow) -> int | None:
        """What an admission from a prefix starts from: the state after it was kept with it."""
        if self._snapshots is None or not row.prefix_blocks:
            return None
        return self._snapshots.use(row.request.block_hashes[len(row.prefix_blocks) - 1])

    def _state_use(self, row: PlannedRow, restore: int | None) -> StateUse:
        assert self._states is not None
        assert self._snapshots is not None
        stride = self._config.scheduler.state_snapshot_tokens
        due = stride and (row.start + row.num_tokens) % stride == 0
        return StateUse(
            self._states.slot_of(row.request.request_id), restore, self._snapshots.reserve() if due else None
        )

    def _preempt(self, request: Request, now: float) -> None:
        """Give everything back and wait again. What it computed stays in the prefix cache until it is evicted."""
        self._leave(request)
        request.computed = request.scheduled = request.target = request.num_pending = 0
        request.drafts = ()
        request.waiting_since = now
        self.waiting.put_back(request, self._config.scheduler.requeue)

    def roll_back(self, plan: Plan, step: StepPlan) -> None:
        """The executor ran out of memory and computed nothing of this plan: undo its progress, to plan it again.

        The requests keep the blocks that they took, and their seats.
        """
        prompts = list(self.prefilling.values())
        self.lose_encoded(step)
        for row, scheduled in zip(plan.rows, step.rows, strict=True):
            request = row.request
            request.scheduled = row.start
            request.num_pending -= scheduled.sampling is not None
            self.discard(scheduled)
            if row.kind is RowKind.LAST:
                prompts.append(self.decoding.pop(request.request_id))
        prompts.sort(key=attrgetter("place"))
        self.prefilling = {request.request_id: request for request in prompts}

    def ran_out(self, plan: Plan, *, again: bool) -> None:
        """A step with prefill ran out of memory; `again`: it was the second try. Later ones carry less of it."""
        self._prefill_limit.ran_out(self._prefill_cost(plan), again=again)

    def went_well(self, plan: Plan) -> None:
        """A step was computed. After a shortage this shows whether later ones may carry more prefill again."""
        if not self._prefill_limit.is_whole:
            self._prefill_limit.went_well(self._prefill_cost(plan))

    def _prefill_cost(self, plan: Plan) -> int:
        rule = ChunkRule(self._config, self._prefill_limit.value)
        return sum(rule.cost(row.start, row.num_tokens) for row in plan.rows if row.kind is not RowKind.DECODE)

    # --- after the step --------------------------------------------------------------------------------------------

    def advance(self, request: Request, scheduled: ScheduledRequest, end: int) -> None:
        """Positions below `end` are computed: publish the blocks they fill, and the state that was kept at it."""
        request.computed = end
        if self.encoder is not None and request.inputs:
            self.encoder.advance(request, end)
        if self.waiting.shares and scheduled.sampling is not None:
            decoded = scheduled.kind is RowKind.DECODE  # with drafts, several in one row
            self.waiting.serve(request, answer_tokens=end - scheduled.start if decoded else 1)
        num_full = end // self._blocks.block_size
        if num_full > request.num_published:
            request.extend_hashes(end, self._blocks.block_size)
            for i in range(request.num_published, num_full):
                self._blocks.publish(request.block_ids[i], request.block_hashes[i])
            request.num_published = num_full
        if scheduled.state is not None and scheduled.state.save is not None and self._snapshots is not None:
            if end == scheduled.end:
                self._snapshots.publish(scheduled.state.save, request.block_hashes[num_full - 1])
            else:  # a draft was rejected before the position at which the state was to be kept
                self._snapshots.cancel(scheduled.state.save)

    def draft(self, request: Request, drafts: tuple[int, ...], method: DraftMethod) -> None:
        """Keep what is drafted to follow, as far as the answer may still go; what was not accepted is taken back."""
        request.scheduled = request.computed
        request.drafts = drafts[: request.most_drafts]
        request.draft_method = method

    def discard(self, scheduled: ScheduledRequest) -> None:
        """A row's results are nobody's: its request has ended or was preempted, or the row failed."""
        if scheduled.state is not None and scheduled.state.save is not None and self._snapshots is not None:
            self._snapshots.cancel(scheduled.state.save)

    def lose_encoded(self, step: StepPlan) -> None:
        """The step failed, and nobody knows what it has encoded of what it was to encode."""
        if self.encoder is not None:
            self.encoder.lose(work.digest for work in step.encodes)

    def release(self, request: Request, *, by_itself: bool = False) -> None:
        """The one way out, for stop, length, abort and error alike: leave the queues and give everything back.
        `by_itself`: its answer is as long as it would ever be."""
        waited = self.waiting.remove(request) or self.preparing.pop(request.request_id, None) is not None
        if not waited:
            if self._forecast is not None:
                self._forecast.end(request, by_itself=by_itself)
            self._leave(request)
        self.waiting.leave(request)
        self.deadlines.remove(request)
        if not (self.waiting or self.prefilling or self.decoding):
            self._ratio.reset()
            self._prefill_limit.rest()
            if self._forecast is not None:
                self._forecast.reset()

    def _leave(self, request: Request) -> None:
        if self.prefilling.pop(request.request_id, None) is None:
            del self.decoding[request.request_id]  # KeyError: released twice
        self._promised -= self._still_promised(request)
        if self._forecast is not None:
            self._forecast.leave(request)
        self._blocks.release(request.block_ids)
        if self._states is not None:
            self._states.give_back(request.request_id)
        if self.encoder is not None:
            self.encoder.leave(request)
        request.block_ids = ()
        request.num_published = 0
        request.epoch += 1
