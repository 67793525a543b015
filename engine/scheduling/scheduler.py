"""Owns the queues, and the effects of a plan on them: admission, growth, release. Long: each has its way back.
Never chooses what runs: `engine.scheduling.planner` does, from a view of these queues that it does not change."""

from __future__ import annotations

import math
from itertools import takewhile
from operator import attrgetter

from engine.config import ResolvedConfig
from engine.protocol import DraftMethod, PrefillCosts, num_pairs, why_late
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.chunk_policy import ChunkRule
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.encoder_cache import EncodedInputs
from engine.scheduling.forecast import Forecast
from engine.scheduling.loading import Loads
from engine.scheduling.planner import Plan, PlannedRow, View, make_plan
from engine.scheduling.prefill_limit import PrefillLimit
from engine.scheduling.prefill_rate import PrefillRate
from engine.scheduling.request import Request
from engine.scheduling.request_parts import Drafts
from engine.scheduling.reservation import ReserveRatio
from engine.scheduling.resources import Resource, RowParts, StepParts
from engine.scheduling.retention import BlockFacts
from engine.scheduling.service import service_of
from engine.scheduling.state_slots import RecurrentStates
from engine.scheduling.step_prediction import StepTimeModel
from engine.scheduling.step_time import StepWork, chunk_work
from engine.scheduling.tier_index import Moves, TierIndex
from engine.scheduling.time_order import Hopes, Order
from engine.scheduling.waiting import WaitingQueue
from engine.step import RowKind, ScheduledRequest, StepPlan

MOST_LOOKED_UP = 1024
"""Blocks of a new prompt that are looked up in lower tiers, for a prediction: 6,000 took 4 ms."""
NO_PARTS = RowParts()
"""For all rows of a model whose requests hold only blocks; never changed."""
_NUM_DECODE_TOKENS = attrgetter("num_decode_tokens")


class Scheduler:
    """Waiting, prefilling and decoding requests over one block manager.

    A request waits, prefills chunk by chunk, decodes, and is released. A preemption releases its memory and lets it
    wait again, to compute its prompt and its answer so far once more; nothing is sampled twice. Its cursor `scheduled`
    moves when a plan is committed, `computed` when the results arrive.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        blocks: BlockManager,
        step_times: StepTimeModel | None = None,
        tiers: TierIndex | None = None,
    ) -> None:
        """`step_times` predicts what steps take; it is needed where the config has targets. `tiers`: what lies below
        the device."""
        assert step_times is not None or not config.targets.any, "targets need predictions"
        self._step_times = step_times
        self._order = Order(config.scheduler.priority_age_ms / 1000)
        self._hopes = Hopes()
        self._prefill_rate = None if step_times is None else PrefillRate(step_times, config)
        self._config = config
        self._blocks = blocks
        self._ratio = ReserveRatio(config.scheduler)
        self._forecast = Forecast(config) if config.scheduler.reserve_mode == "learned" else None
        self.resources = _resources(config)
        self._promised = 0  # blocks that admitted requests may still allocate in their lives
        self._next_step_id = 0
        self._last_decode = 0.0
        self._prefill_limit = PrefillLimit(config.max_prefill_tokens, config.block_size)
        self._service = service_of(config, step_times)
        self.waiting = WaitingQueue(config.scheduler, self._service)
        self.deadlines = Deadlines()
        self._tiers = tiers
        self.loads = None if tiers is None else Loads(tiers, blocks, self.waiting, config.kv_tiers.load_timeout_s)
        self.preparing: dict[str, Request] = {}
        """Requests whose prompts are still being prepared. They keep their place in the queue, but are not planned."""
        # Each in the order in which it is served: dicts for O(1) removal in the middle.
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}
        """Requests whose whole prompt is scheduled."""

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def loading(self) -> dict[str, Request]:
        """Requests that wait for KV from a lower tier. They have no seat, and are not in the queue."""
        return {} if self.loads is None else self.loads.requests

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are in no step yet. Prefix hits of waiting requests are not known yet and count as
        work."""
        return self.waiting.num_tokens + sum(r.target - r.scheduled for r in self.prefilling.values())

    def prefill_costs(self) -> PrefillCosts | None:
        """Predict what prefill takes beside the requests that decode now; None without predictions."""
        return None if self._prefill_rate is None else self._prefill_rate.costs(len(self.decoding))

    def idle_prefill_costs(self) -> PrefillCosts | None:
        """Predict what prefill takes if nothing else runs; None without predictions."""
        return None if self._prefill_rate is None else self._prefill_rate.idle_costs()

    def queued_prefill_s(self, costs: PrefillCosts) -> float:
        """Predict when the prompts that wait or are partly computed are prefilled. Takes O(partly computed)."""
        partial = [(request.scheduled, request.target) for request in self.prefilling.values()]
        tokens = self.waiting.num_new_tokens + sum(end - start for start, end in partial)
        pairs = self.waiting.num_new_pairs + sum(num_pairs(start, end) for start, end in partial)
        return costs.token_s * tokens + costs.pair_s * pairs

    def begin(self, step: StepPlan, work: StepWork) -> None:
        """Note that a step begins, whose work is `work`."""
        if self._prefill_rate is not None:
            self._prefill_rate.note(step, work)
            self._service.begin(work.tokens)

    @property
    def reserve_ratio(self) -> float:
        return self._ratio.value

    @property
    def reserve_margin(self) -> float:
        return self._forecast.margin if self._forecast else 0.0

    def add(self, request: Request, now: float, *, prepared: bool = True) -> None:
        """Queue a request. Its deadlines count from `now`."""
        request.arrived = request.waiting_since = now
        self._predict(request)
        self.waiting.enter(request)
        self.deadlines.add(request, now)
        if not prepared:
            self.waiting.remove(request)
            self.preparing[request.request_id] = request

    def why_late(self, request: Request) -> str | None:
        """Return why the deadline of a new request cannot be met, as a clause; None if perhaps it can."""
        if request.timeout_s is None:
            return None
        return why_late("its prompt", request.prefill_s, request.timeout_s)

    def _predict(self, request: Request) -> None:
        """Look up how much of a new request's prompt need not be computed. If it has a target or a deadline,
        predict how long the rest takes, and place it by that if it has a target."""
        if self._step_times is None:
            return
        hashes = request.block_hashes[: request.num_reusable // self._blocks.block_size]
        cached = len(self._blocks.match(hashes))
        if (tiers := self._tiers) is not None:
            others = hashes[cached : cached + MOST_LOOKED_UP]
            cached += sum(1 for _ in takewhile(lambda digest: tiers.nearest(digest) is not None, others))
        request.expected_cached = cached * self._blocks.block_size
        if request.ttft_s == math.inf and request.timeout_s is None:
            return
        most = min(self._config.max_prefill_tokens, self._config.max_num_batched_tokens)
        request.prefill_s = self._step_times.now.prefill_seconds(request.expected_cached, request.prompt_len, most)
        if request.ttft_s != math.inf:
            request.place = self._order.place(request)
            self._hopes.add(request)

    def relegate(self, now: float) -> None:
        """Let waiting requests that can no longer be in time go after those that can."""
        for request in self._hopes.lost(now):
            waits = self.waiting.remove(request)  # or else it is still being prepared
            request.place = self._order.put_behind(request.place)
            if waits:
                self.waiting.add(request)

    def prepared(self, request_id: str) -> None:
        """Let the request be planned from now on, in its place by arrival."""
        if request := self.preparing.pop(request_id, None):
            self.waiting.add(request)

    def find(self, request_id: str) -> Request | None:
        for running in (self.decoding, self.prefilling, self.preparing, self.loading):
            if request_id in running:
                return running[request_id]
        return self.waiting.find(request_id)

    def plan(self, now: float) -> Plan:
        """Plan the next step, at `now` in monotonic seconds; empty if nothing can run. Changes nothing."""
        view = View(
            waiting=self.waiting,
            prefilling=self.prefilling,
            decoding=self.decoding,
            blocks=self._blocks,
            resources=self.resources,
            promised_blocks=self._promised,
            ratio=self._ratio.value,
            now=now,
            prefill_limit=self._prefill_limit.value,
            last_decode=self._last_decode,
            num_queued_tokens=self.num_queued_tokens,
            forecast=self._forecast,
            prediction=self._step_times.now if self._step_times else None,
            tiers=self._tiers,
            loading=self.loading,
            coming=() if self.loads is None else self.loads.coming,
        )
        return make_plan(view, self._config)

    # --- commit: moves requests and takes blocks exactly as planned -----------------------------------------------

    def commit(self, plan: Plan, now: float) -> StepPlan:
        if self.loads is not None:
            for request in plan.unloaded:
                self.loads.put_back(request)
        for request in plan.preempted:
            self._preempt(request, now)
        if self._tiers is not None:
            wanted = (digest for load in plan.loads for digest in load.request.block_hashes[: load.num_blocks])
            self._tiers.begin_stores(plan.stores, self._blocks, now, wanted)
        for request in plan.overtaken:
            request.num_overtakes += 1
        if not self._prefill_limit.is_whole and any(row.kind is not RowKind.DECODE for row in plan.rows):
            self._prefill_limit.begin()
        claimed = [] if self.loads is None else self.loads.claim(plan.loads)
        for row in plan.rows:
            if row.prefix_blocks is not None:  # all claims first, so that an allocation below cannot evict them
                self._admit(row.request, row.prefix_blocks, now)
        if self.loads is not None:
            self.loads.fetch(plan.loads, claimed, now)
        self._keep_ratio(plan)
        rows = tuple(self._schedule(row, now) for row in plan.rows)
        if self._config.scheduler.long_prefill_defer_tokens:
            self._note_turns(plan, now)
        parts = self._finish() if rows else StepParts()
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        moved = Moves() if self._tiers is None else self._tiers.take_moves(beside_rows=bool(rows))
        return StepPlan(
            step_id,
            rows,
            state_moves=parts.state_moves,
            dropped=parts.dropped,
            encodes=parts.encodes,
            moves=moved.moves,
            tier_drops=moved.drops,
            cancelled=moved.cancelled,
        )

    def _keep_ratio(self, plan: Plan) -> None:
        if not plan.rows:
            return  # it only moves KV
        if self._forecast is not None:
            self._forecast.after_step(preempted=len(plan.preempted))
        if plan.preempted:
            self._ratio.after_preemption(self.decoding.values())
        else:
            kinds = {row.kind is RowKind.DECODE for row in plan.rows}
            self._ratio.after_step(decoded=True in kinds, prefilled=False in kinds)

    def _admit(self, request: Request, prefix: tuple[int, ...], now: float) -> None:
        self.waiting.remove(request)
        self._hopes.remove(request)
        self.prefilling[request.request_id] = request
        if self._forecast is not None:
            self._forecast.admit(request, sum(map(self._blocks.is_held, prefix)))
        self._blocks.claim(prefix)
        if self._tiers is not None:
            hits = request.block_hashes[: len(prefix)]
            self._tiers.used(hits, now)
            self._offer(request, range(len(prefix)), self._tiers)
        request.block_ids = prefix
        request.num_published = len(prefix)
        request.computed = request.scheduled = len(prefix) * self._blocks.block_size
        if not request.was_scheduled:
            request.cached = request.computed
            if self.waiting.shares:
                self.waiting.serve(request, self._service.prompt(request.cached, request.prompt_len))
        request.target = len(request.token_ids)
        self._promised += self._still_promised(request)
        for resource in self.resources:
            resource.admit(request, len(prefix))

    @staticmethod
    def _note_turns(plan: Plan, now: float) -> None:
        """Note which prompts had their turn. What others left is none: it may be little in every step."""
        for row in plan.rows:
            if row.kind is RowKind.MIDDLE and row.request not in plan.stepped_aside:
                row.request.last_turn = now

    def _still_promised(self, request: Request) -> int:
        return self._blocks.blocks_for(request.lifetime_tokens) - len(request.block_ids)

    def _schedule(self, row: PlannedRow, now: float) -> ScheduledRequest:
        request, kind, start, num_tokens, _, _ = row
        end = start + num_tokens
        assert start == request.scheduled, f"{request.request_id}: at {request.scheduled}, not {start}"
        self._grow(request, end)
        sampling = None if kind is RowKind.MIDDLE else request.next_sampling()
        parts = self._take(request, start, end) if self.resources else NO_PARTS
        scheduled = ScheduledRequest(
            request.request_id,
            kind,
            start,
            request.next_tokens(num_tokens),
            request.block_ids,
            sampling,
            scoring=None if kind is RowKind.DECODE else request.to_score(end),
            state=parts.state,
            pool_from=request.pooling.first_of(start, end, request.prompt_len) if request.pooling else None,
            answer=request.answer() if sampling and sampling.controls and sampling.controls.looks_back else (),
            inputs=parts.inputs,
            adapter=request.adapter,
        )
        request.scheduled = end
        request.num_pending += sampling is not None
        request.was_scheduled = True
        request.awaits_token = False
        if num_tokens == 1:
            request.drafts = None  # the plan had no room for them, so the next row waits for nothing
        request.waiting_since = now
        if kind is RowKind.DECODE:
            self._last_decode = now
        elif kind is RowKind.LAST:
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

    def _finish(self) -> StepParts:
        parts = StepParts()
        for resource in self.resources:
            resource.finish(parts)
        return parts

    def _take(self, request: Request, start: int, end: int) -> RowParts:
        parts = RowParts()
        for resource in self.resources:
            resource.take(request, start, end, parts)
        return parts

    def _preempt(self, request: Request, now: float) -> None:
        """Release everything and let the request wait again. Its computed blocks stay in the prefix cache until
        evicted."""
        self._leave(request)
        request.computed = request.scheduled = request.target = request.num_pending = 0
        request.drafts = None
        request.awaits_token = False
        request.waiting_since = now
        request.num_loads = 0
        self.waiting.put_back(request, self._config.scheduler.requeue)

    def roll_back(self, plan: Plan, step: StepPlan) -> None:
        """Undo the progress of a plan of which the executor, out of memory, computed nothing, to plan it again.

        The requests keep the blocks that they took, and their seats.
        """
        prompts = list(self.prefilling.values())
        self.lose(step)
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
        """Lower the prefill limit after a step with prefill ran out of memory; `again` means that it was the retry."""
        self._prefill_limit.ran_out(self._prefill_cost(plan), again=again)

    def went_well(self, plan: Plan) -> None:
        """Note that a step was computed. After a shortage this may raise the prefill limit again."""
        if not self._prefill_limit.is_whole:
            self._prefill_limit.went_well(self._prefill_cost(plan))

    def _prefill_cost(self, plan: Plan) -> int:
        rule = ChunkRule(self._config, self._prefill_limit.value)
        return sum(rule.cost(row.start, row.num_tokens) for row in plan.rows if row.kind is not RowKind.DECODE)

    # --- after the step --------------------------------------------------------------------------------------------

    def advance(self, request: Request, scheduled: ScheduledRequest, end: int) -> None:
        """Positions below `end` are computed: publish the blocks that they fill, and tell the resources."""
        request.computed = end
        if self.waiting.shares and scheduled.sampling is not None:
            decoded = scheduled.kind is RowKind.DECODE  # with drafts, several in one row
            self.waiting.serve(request, self._service.answer(scheduled.start, end, decoded=decoded))
        num_full = end // self._blocks.block_size
        if num_full > request.num_published:
            request.extend_hashes(end, self._blocks.block_size)
            for i in range(request.num_published, num_full):
                self._blocks.publish(request.block_ids[i], request.block_hashes[i])
            if self._tiers is not None:
                self._offer(request, range(request.num_published, num_full), self._tiers)
            request.num_published = num_full
        for resource in self.resources:
            resource.advance(request, scheduled, end)

    def _offer(self, request: Request, blocks: range, tiers: TierIndex) -> None:
        """Tell the tiers of those of a request's published blocks that they lack."""
        for block in blocks:
            if tiers.lacks(request.block_hashes[block]):
                tiers.published(request.block_hashes[block], self._facts(request, block))

    def _facts(self, request: Request, block: int) -> BlockFacts:
        """Return what is known of one of a request's blocks."""
        start, size = block * self._blocks.block_size, self._blocks.block_size
        cost_s = None
        if self._step_times is not None:
            cost_s = self._step_times.now.seconds(chunk_work(start, size, last=False))
        parent = request.block_hashes[block - 1] if block else b""
        return BlockFacts(start, parent, cost_s, request.tenant, request.session)

    def draft(self, request: Request, drafts: tuple[int, ...], method: DraftMethod) -> None:
        """Keep new drafts, as far as the answer may still go, and roll back those that were not accepted."""
        request.scheduled = request.computed
        kept = drafts[: request.most_drafts]
        request.drafts = Drafts(kept, method) if kept else None

    def await_token(self, request: Request) -> None:
        """Plan no row of the request before its token in flight is read, so that drafts can follow it (overlap)."""
        request.awaits_token = True

    @property
    def standing_aside(self) -> tuple[str, ...]:
        """The requests that have no row in the next plan, because they stand aside. Takes O(decoding)."""
        return tuple(name for name, request in self.decoding.items() if request.stands_aside)

    @property
    def must_read_first(self) -> bool:
        """Whether rows stand aside, and no other row goes on from a step in flight: then a plan before its results
        would only part rows that can run together (overlap). Takes O(decoding)."""
        flying = [request for request in self.decoding.values() if request.num_pending]
        return any(request.stands_aside for request in flying) and not any(map(_NUM_DECODE_TOKENS, flying))

    def discard(self, scheduled: ScheduledRequest) -> None:
        """Drop a row's results: its request has ended or was preempted, or the row failed."""
        for resource in self.resources:
            resource.discard(scheduled)

    def lose(self, step: StepPlan) -> None:
        """Tell the resources that the step failed at an unknown point. Its rows are discarded one by one."""
        for resource in self.resources:
            resource.lose(step)

    def release(self, request: Request, *, by_itself: bool = False) -> None:
        """End a request, after stop, length, abort and error alike: it leaves the queues and releases everything.
        `by_itself` means that its answer has its natural length."""
        waited = self.waiting.remove(request) or self.preparing.pop(request.request_id, None) is not None
        if self.loads is not None and request.loading is not None:
            self.loads.give_up(request)
            waited = True
        if not waited:
            if self._tiers is not None:
                self._tiers.end_turn(request, request.num_published)
            if self._forecast is not None:
                self._forecast.end(request, by_itself=by_itself)
            self._leave(request)
        self.waiting.leave(request)
        self.deadlines.remove(request)
        self._hopes.remove(request)
        if not (self.waiting or self.prefilling or self.decoding or self.loading):
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
        for resource in self.resources:
            resource.release(request)
        request.block_ids = ()
        request.num_published = 0
        request.epoch += 1


def _resources(config: ResolvedConfig) -> tuple[Resource, ...]:
    """Make the resources that requests of this model hold besides KV blocks."""
    resources: list[Resource] = []
    if config.recurrent_state:
        policy = config.scheduler
        resources.append(
            RecurrentStates(
                num_snapshots=policy.state_snapshots,
                stride=policy.state_snapshot_tokens,
                block_size=config.block_size,
            )
        )
    if config.inputs:
        resources.append(EncodedInputs(config.encoder_cache_tokens, config.max_encoder_tokens))
    return tuple(resources)
