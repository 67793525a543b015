"""Owns the checks of the specification's invariants on a running engine core. Long: I-1 to I-37, each by name, except
I-17, I-20, I-24, I-25, I-34 and I-36, which do not show in a core's state.
Never steers: whoever drives the core decides what happens to it, and every step of it is checked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.kv_tiers import BlockMove, MoveKind, Tier
from engine.lockstep.shape import StepShape
from engine.protocol import (
    TERMINAL,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    RequestRejected,
    SamplingParams,
    Scheduled,
    Token,
)
from engine.scheduling.planner import Plan, PlannedRow
from engine.scheduling.request import Request
from engine.scheduling.state_slots import RecurrentStates
from engine.step import ExecutorOutOfMemoryError, RowKind, ScheduledRequest, StepPlan
from tests.support.deep_state import deep_state
from tests.support.engines import RecordingCore, resource_of
from tests.support.oracle import answer_of, logprobs_of, pooled_of, prompt_logprobs_of


class CheckedCore(RecordingCore):
    """A core that checks the invariants on every plan, step and event. `fault` is what happens to the next step."""

    def __init__(self, **overrides: Any) -> None:
        super().__init__(before_step=self._before_step, failing=self._fails_alone, graph_sizes=(1, 2, 4), **overrides)
        self._reached: set[str] = set()
        self._violation: AssertionError | None = None
        self.fault: str | None = None  # "step", "row" or "memory"
        self.submitted: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.expected_failures: set[str] = set()
        self.pooling: dict[str, str | None] = {}
        self.live: dict[str, Request] = {}
        self._next_start: dict[str, tuple[int, int]] = {}  # request id -> (least, most) start of its next row
        self._last_ratio, self._last_preemptions = self._scheduler.reserve_ratio, 0
        self._progress = (-1, -1, 0)  # (the elder's arrival index, its cursor, steps since it moved)
        self.looks_deep = False  # compares all that the scheduler holds before and after a plan
        self.tier_fault = False  # the next load fails
        if self.mover is not None:
            self.mover._failing = self._fails_to_load
        self._give_up = self._scheduler.discard
        self._scheduler.discard = self._discard  # type: ignore[method-assign]
        self._make_plan = self._scheduler.plan
        self._scheduler.plan = self._checked_plan  # type: ignore[method-assign]

    THINGS = (
        "preempted",
        "prefix hit",
        "prompt in chunks",
        "span kept whole",
        "prompt scored in chunks",
        "prompt pooled in chunks",
        "draft accepted",
        "draft rejected",
        "stood aside",
        "state restored",
        "state taken back",
        "drafts, states and spans in a step",
        "result discarded",
        "cut by the engine",
        "step failed",
        "row failed",
        "out of memory",
        "cancelled",
        "late",
        "stopped",
        "prompt skipped",
        "decode row waited for chunks",
        "long prompt stepped aside",
        "computed whole again",
        "loaded",
        "load failed",
        "offloaded",
        "evicted from a tier",
        "lost by a tier",
    )

    def reached(self) -> set[str]:
        """Return which of THINGS have happened so far."""
        load = self.load()
        happened = {
            "preempted": load.num_preemptions,
            "loaded": sum(tier.hit_blocks for tier in load.tiers),
            "evicted from a tier": sum(tier.evicted_blocks for tier in load.tiers),
        }
        return self._reached | {name for name, count in happened.items() if count}

    # --- driving ----------------------------------------------------------------------------------------------------

    def accept(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, **options: Any) -> None:
        """Submit. Raises RequestRejected like the core; then nothing of the request is kept anywhere (I-27)."""
        before = self.load()
        try:
            self.send_params(request_id, prompt, params, **options)
        except RequestRejected:
            assert self.load() == before, "I-27"
            raise
        request = self._scheduler.find(request_id)
        assert request is not None
        self.submitted[request_id] = (prompt, params)
        self.pooling[request_id] = options.get("pooling")
        self.live[request_id] = request

    def cancel(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self._reached.add("cancelled")
        self.see(self.abort(request_id))
        self._last_ratio = self._scheduler.reserve_ratio  # an idle engine starts over

    def checked_step(self, joint: StepShape | None = None) -> None:
        """Step, or let as much time pass if the thread of an engine would sleep. With `joint`, other ranks wake it."""
        if joint is None and not self.is_awake:
            self.now += self._tick_s
            self._check_asleep()
            return
        events = self.step(joint)
        if self._violation is not None:
            raise self._violation
        self.see(events)
        self.check_state()

    def _check_asleep(self) -> None:
        """Whoever waits is woken: requests that can run by the end of loads, and these by the mover."""
        loading, waiting = self._scheduler.loading.values(), self._scheduler.waiting
        assert loading or not waiting, f"I-19: nobody will wake it: {self.load()}"
        under_way = {} if self.mover is None else self.mover._under_way
        awaited = {move_id for request in loading if request.loading for move_id in request.loading.awaited}
        assert not loading or awaited & under_way.keys(), "I-37: no load is under way"

    def finish(self) -> None:
        """Run to the end and check what every request got."""
        self.prepare_all()
        for _ in range(self.most_steps):
            self.let_moves_end(100)
            if not self.has_work and not self.is_moving:
                break
            self.checked_step()
        self.check_end()

    @property
    def most_steps(self) -> int:
        return 500 + 4 * sum(len(prompt) + (params.max_tokens or 0) for prompt, params in self.submitted.values())

    def prepare_all(self) -> None:
        for request_id in list(self._scheduler.preparing):
            self.prepared(request_id)

    def check_end(self) -> None:
        assert not self.has_work, f"I-19: still live after {self.most_steps} steps: {self.load()}"
        assert not self._scheduler.loading, "I-37"
        self.check_state()
        self.check_idle()
        for request_id in self.submitted:
            self.check_answer(request_id)

    # --- tiers ------------------------------------------------------------------------------------------------------

    def let_moves_end(self, count: int) -> None:
        if self.mover is not None:
            self.mover.release(count)

    def lose(self, digest: bytes) -> None:
        """Let the disk lose a block, as if another engine needed the room."""
        assert self.mover is not None
        self._reached.add("lost by a tier")
        self.mover.lose(Tier.DISK, digest)

    def _fails_to_load(self, move: BlockMove) -> str | None:
        if move.kind is not MoveKind.LOAD or not self.tier_fault:
            return None
        self.tier_fault = False
        self._reached.add("load failed")
        return "injected"

    def _check_loading(self) -> None:
        """I-37: a request that loads has no seat and nothing else of a running one's, and waits only for moves that are
        under way. What the index says of the tiers is so."""
        for request in self._scheduler.loading.values():
            assert request.loading is not None, "I-37"
            assert request.block_ids == (), "I-37"
            assert request.loading.awaited, "I-37: it has all it waits for"
            assert self._scheduler.waiting.find(request.request_id) is None, "I-37"
        if self._tiers is None or self.mover is None:
            return
        assert len(self.mover._kept.get(Tier.HOST, {})) <= self.mover.host_blocks, "I-37: a bound"
        for tier, known in self._tiers._known.items():
            changed = {change.digest for change in self.mover._changes}
            failed = {result.move.digest for result in self.mover._results if result.error}
            assert known.has.keys() - changed - failed <= self.mover._kept[tier].keys(), "I-37"

    # --- faults -----------------------------------------------------------------------------------------------------

    def _before_step(self, plan: StepPlan) -> None:
        try:
            self.check_step(plan)
            prefill = any(row.kind is not RowKind.DECODE for row in plan.rows)
            if self.fault == "memory" and prefill:
                self.fault = None
                self._reached.add("out of memory")
                if self._retrying:  # the second time in a row: half of it was too much as well
                    self.expected_failures |= {row.request_id for row in plan.rows}
                raise ExecutorOutOfMemoryError("injected")
            if self.fault == "step":
                self.fault = None
                self._reached.add("step failed")
                self.expected_failures |= {row.request_id for row in plan.rows}
                raise RuntimeError("injected")
            for row in plan.rows:
                self._check_contiguous(row)
        except AssertionError as violation:  # the core takes it for a failure of the step
            self._violation = violation
            raise

    def _fails_alone(self, row: ScheduledRequest) -> str | None:
        if self.fault != "row":
            return None
        self.fault = None
        self._reached.add("row failed")
        self.expected_failures.add(row.request_id)
        return "injected"

    def _discard(self, scheduled: ScheduledRequest) -> None:
        self._reached.add("result discarded")
        self._give_up(scheduled)

    # --- a plan, before it is committed -----------------------------------------------------------------------------

    def _checked_plan(self, now: float) -> Plan:
        before = deep_state(self._scheduler) if self.looks_deep else None
        plan = self._make_plan(now)
        assert plan == self._make_plan(now), "I-32"
        assert before is None or before == deep_state(self._scheduler), "I-32: a dry run changes nothing"
        for row in plan.rows:
            self._check_row(row)
        self._check_loads(plan)
        aside = set(self._scheduler.standing_aside)
        assert not aside & {row.request.request_id for row in plan.rows}, "I-33: nobody knows that row yet"
        self._reached |= {"stood aside"} if aside and plan.rows else set()
        self._check_victims(plan)
        self._check_decodes(plan, now)
        self._check_admissions(plan, now)
        self._check_stepped_aside(plan, now)
        for row in plan.rows:
            if row.prefix_blocks is not None:
                self._next_start[row.request.request_id] = (row.start, row.start)
            self._reached |= {"prefix hit"} if row.prefix_blocks else set()
            self._reached |= {"cut by the engine"} if row.cuts else set()
        return plan

    def _check_row(self, row: PlannedRow) -> None:
        request, end = row.request, row.start + row.num_tokens
        assert row.num_tokens > 0, "I-6"
        if row.prefix_blocks is None:
            assert row.start == request.scheduled, "I-5"
        else:
            assert row.start == len(row.prefix_blocks) * self.config.block_size, "I-5"
            assert row.start <= len(request.token_ids) - 1, "I-6, I-11"
            assert not any(a < row.start < b for a, b in atomic_spans(request)), "I-13"
        target = len(request.token_ids) if row.prefix_blocks is not None else request.target
        if row.kind is RowKind.DECODE:
            assert row.start >= target, "I-8"
            assert end <= request.lifetime_tokens, "I-35"
        else:
            assert (row.kind is RowKind.LAST) == (end == target), "I-7, I-8"
            if not self.config.scheduler.enable_chunked_prefill:
                assert row.kind is RowKind.LAST, "I-5: computed whole"
                self._reached |= {"computed whole again"} if request.was_scheduled else set()
            assert not any(a < end < b for a, b in atomic_spans(request)), "I-13"
            assert not any(a < cut < b for a, b in atomic_spans(request) for cut in row.cuts), "I-13"

    def _check_loads(self, plan: Plan) -> None:
        loading = {load.request for load in plan.loads}
        assert not loading & {row.request for row in plan.rows}, "I-37: it has no seat"
        assert not plan.preempted or len(plan.unloaded) == len(self._scheduler.loading), "I-37: loads go first"
        assert len(loading) + len(self._scheduler.loading) <= self.config.max_num_seqs, "I-37"
        victims = {digest for victim in plan.preempted for digest in victim.block_hashes}
        self._reached |= {"offloaded"} if any(store.digest in victims for store in plan.stores) else set()

    def _check_victims(self, plan: Plan) -> None:
        victims = set(plan.preempted)
        running = [*self._scheduler.decoding.values(), *self._scheduler.prefilling.values()]
        assert len(victims) == len(plan.preempted), "I-4"
        assert not victims & {row.request for row in plan.rows}, "I-4"
        if victims:
            assert min(running, key=lambda request: request.arrival_index) not in victims, "I-18"
            assert not any(row.prefix_blocks is not None for row in plan.rows), "no admission after a preemption"

    def _check_decodes(self, plan: Plan, now: float) -> None:
        policy = self.config.scheduler
        rows = {row.request for row in plan.rows}
        due = [r for r in self._scheduler.decoding.values() if r.num_decode_tokens and r not in plan.preempted]
        if policy.batch_mode == "mixed_prefill_first":
            overdue = [r for r in due if (now - r.waiting_since) * 1000 >= policy.decode_starve_ms]
            assert all(request in rows for request in overdue), "I-22"
            shares = policy.chunk_owner == "scheduler" and policy.prompt_logprobs_step == "mixed"
            waits = shares and rows and not rows.issuperset(due)
            self._reached |= {"decode row waited for chunks"} if waits else set()
            return
        mixed = policy.batch_mode != "prefill_first" and policy.chunk_owner == "scheduler"
        if mixed and policy.prompt_logprobs_step == "mixed":
            assert all(request in rows for request in due), "I-22"
        waited_ms = (now - self._scheduler._last_decode) * 1000
        assert not due or waited_ms <= policy.decode_starve_ms or any(r in rows for r in due), "I-22"

    def _check_admissions(self, plan: Plan, now: float) -> None:
        admitted = {row.request: row for row in plan.rows if row.prefix_blocks is not None}
        assert not admitted.keys() & set(plan.skipped), "I-4"
        seen, passes = 0, False
        for request in self._scheduler.waiting.in_order(now):
            if seen == len(admitted):
                break
            if request in admitted:
                seen += 1
                assert not passes or admitted[request].kind is RowKind.LAST, "I-23: whole, or it holds the next step up"
            elif any(load.request is request for load in plan.loads):
                continue  # it leaves the queue
            elif request in plan.skipped:
                passes = True
                self._reached.add("prompt skipped")
            else:
                assert self.config.scheduler.admission_order == "bypass", "I-23"

    def _check_stepped_aside(self, plan: Plan, now: float) -> None:
        policy = self.config.scheduler
        for request in plan.stepped_aside:
            self._reached.add("long prompt stepped aside")
            assert request.target - request.scheduled >= policy.long_prefill_defer_tokens > 0, "I-21"
            assert (now - request.last_turn) * 1000 < policy.long_prefill_defer_ms, "I-21: its turn is due"

    # --- a step, as the executor gets it ----------------------------------------------------------------------------

    def _check_contiguous(self, row: ScheduledRequest) -> None:
        least, most = self._next_start[row.request_id]
        assert least <= row.start <= most, "I-5"
        drafted = row.kind is RowKind.DECODE and self.config.num_speculative_tokens
        self._note(row, accepted=row.start > least, rejected=row.start < most)
        self._next_start[row.request_id] = (row.start + 1 if drafted else row.end, row.end)

    def _note(self, row: ScheduledRequest, *, accepted: bool, rejected: bool) -> None:
        middle = row.kind is RowKind.MIDDLE
        happened = {
            "prompt in chunks": middle,
            "span kept whole": middle and atomic_spans(self.live[row.request_id]),
            "prompt scored in chunks": middle and row.scoring,
            "prompt pooled in chunks": middle and row.pool_from is not None,
            "draft accepted": accepted,
            "draft rejected": rejected,
            "state restored": row.state is not None and row.state.restore is not None,
            "state taken back": row.state is not None and rejected,
        }
        self._reached.update(name for name, did in happened.items() if did)

    def check_step(self, plan: StepPlan) -> None:
        config, names = self.config, [row.request_id for row in plan.rows]
        prefill = sum(len(row.token_ids) for row in plan.rows if row.kind is not RowKind.DECODE)
        assert plan.num_tokens <= config.max_num_batched_tokens, "I-2"
        assert len(names) <= config.max_num_seqs, "I-2"
        extends = config.scheduler.atomic_policy == "extend"
        spans = any(atomic_spans(request) for name in names if (request := self.live.get(name)))
        assert prefill <= config.max_prefill_tokens or (extends and spans), "I-2"
        assert len(set(names)) == len(names), "I-4"
        decodes = sum(len(row.token_ids) for row in plan.rows if row.kind is RowKind.DECODE)
        rows = sum(row.kind is RowKind.DECODE for row in plan.rows)
        assert decodes <= max(rows, config.max_drafting_tokens), "I-35: all together"
        drafts = any(row.kind is RowKind.DECODE and len(row.token_ids) > 1 and row.state for row in plan.rows)
        if drafts and any(
            row.kind is not RowKind.DECODE and atomic_spans(self.live[row.request_id]) for row in plan.rows
        ):
            self._reached.add("drafts, states and spans in a step")
        most_drafts = config.speculative.num_tokens if config.speculates else config.num_speculative_tokens
        for row in plan.rows:
            assert row.request_id in self.live, "I-26: only what was launched before the end may still run"
            assert row.token_ids, "I-6"
            assert row.sampling is None or row.kind is not RowKind.MIDDLE, "I-7"
            assert len(row.block_ids) * config.block_size >= row.end, "I-12"
            assert len(row.token_ids) <= 1 + most_drafts or row.kind is not RowKind.DECODE, "I-35"

    # --- the state between two steps --------------------------------------------------------------------------------

    def check_state(self) -> None:
        running = [*self._scheduler.prefilling.values(), *self._scheduler.decoding.values()]
        self._check_cursors(running)
        self._check_blocks(running)
        self._check_loading()
        self._check_load(running)
        self._check_forecast(running)
        self._check_ratio()
        self._check_progress(running)
        self.check_what_is_read()
        if self.config.recurrent_state:
            states = resource_of(self, RecurrentStates)
            slots = sorted(states.slots.slot_of(request.request_id) for request in running)
            assert slots == list(range(len(running))), "I-9"

    def _check_cursors(self, running: list[Request]) -> None:
        config = self.config
        assert len(running) <= config.max_num_seqs, "I-3"
        for request in running:
            assert 0 <= request.computed <= request.scheduled, "I-6"
            flying = len(request.drafts.token_ids) if request.drafts and request.num_pending else 0
            assert request.scheduled <= len(request.token_ids) + request.num_pending + flying, "I-6"
            assert request.cached <= request.prompt_len - 1, "I-6"
            if not config.overlap:
                assert request.computed == request.scheduled, "the cursors coincide without overlap"
                assert not request.num_pending, "I-33"
            prefilling = request.request_id in self._scheduler.prefilling
            assert prefilling == (request.scheduled < request.target), "I-6"

    def _check_blocks(self, running: list[Request]) -> None:
        blocks = self._blocks
        loading = [request.loading.block_ids for request in self._scheduler.loading.values() if request.loading]
        holders = Counter(block for held in (*(r.block_ids for r in running), *loading) for block in held)
        assert blocks._holders == [holders[block] for block in range(blocks.num_blocks)], "I-10"
        free, evictable = set(blocks._free), set(blocks._evictable)
        assert len(free) == len(blocks._free), "I-10"
        assert not free & evictable, "I-10"
        assert free | evictable | set(holders) == set(range(blocks.num_blocks)), "I-10"
        assert not (free | evictable) & set(holders), "I-10"
        for request in running:
            assert all(holders[block] == 1 for block in request.block_ids[request.num_published :]), "I-10: writable"
            assert request.num_published * self.config.block_size <= request.computed, "I-11"

    def _check_load(self, running: list[Request]) -> None:
        load, scheduler = self.load(), self._scheduler
        assert load.num_running + load.num_waiting == len(self.live), "I-31"
        queued = sum(len(request.token_ids) for request in scheduler.waiting)
        queued += sum(request.target - request.scheduled for request in scheduler.prefilling.values())
        assert load.num_queued_tokens == queued, "I-31"
        assert load.num_waiting_preempted == sum(request.was_scheduled for request in scheduler.waiting), "I-31"
        graphs = sum(load.graph_hits.values()) + sum(load.graph_misses.values())
        # An engine-owned prompt is one step of several forwards; a failed step counts nowhere.
        assert graphs == load.num_steps, "I-31"
        if self.config.scheduler.reserve_mode == "full":
            assert not load.num_preemptions, "I-15"
            promised = sum(self._blocks.blocks_for(r.lifetime_tokens) - len(r.block_ids) for r in running)
            assert promised <= self._blocks.num_available, "I-15"

    def _check_forecast(self, running: list[Request]) -> None:
        """Check that what is expected of all is exactly the sum of what is expected of each request that runs."""
        forecast = self._scheduler._forecast
        if forecast is None:
            return
        assert forecast._entries.keys() == {request.request_id for request in running}, "I-16"
        shares = [entry.share for entry in forecast._entries.values()]
        for total, number in ((forecast._growth, 0), (forecast._variance, 1)):
            assert total == [sum(share[number][i] for share in shares) for i in range(len(total))], "I-16"

    def _check_ratio(self) -> None:
        ratio, policy = self._scheduler.reserve_ratio, self.config.scheduler
        assert 0 < ratio <= 1, "I-16"
        decay = (policy.ratio_init - policy.ratio_min) / policy.ratio_decay_steps
        allowed = {self._last_ratio, max(self._last_ratio - decay, policy.ratio_min)}
        idle = not (self._scheduler.waiting or self._scheduler.num_running or self._scheduler.loading)
        preempted = self._num_preemptions != self._last_preemptions
        assert ratio in allowed or (idle and ratio == policy.ratio_init) or preempted, "I-16"
        self._last_ratio, self._last_preemptions = ratio, self._num_preemptions

    def _check_progress(self, running: list[Request]) -> None:
        """Check that the oldest request that holds memory progresses, within the bounds of the config."""
        if not running:
            self._progress = (-1, -1, 0)
            return
        elder, policy = min(running, key=lambda request: request.arrival_index), self.config.scheduler
        if self._progress[:2] != (elder.arrival_index, elder.computed):
            self._progress = (elder.arrival_index, elder.computed, -1)
        self._progress = (*self._progress[:2], self._progress[2] + 1)
        bound_ms = policy.decode_starve_ms + policy.prefill_starve_ms + policy.priority_age_ms
        bound_ms += policy.coalesce_partial_ms + policy.coalesce_waiting_ms + policy.long_prefill_defer_ms
        assert self._progress[2] <= bound_ms / (self._tick_s * 1000) + 100, "I-21"

    # --- events -----------------------------------------------------------------------------------------------------

    def see(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id in self.live, f"I-26: {event} after the end"
            if isinstance(event, Scheduled):
                assert not self.events[event.request_id], "I-29"
            elif not isinstance(event, TERMINAL):
                assert isinstance(self.events[event.request_id][0], Scheduled), "I-29"
            if isinstance(event, PromptLogprobs):
                assert len(self.events[event.request_id]) == 1, "I-14"
            if isinstance(event, Pooled):
                assert not [kept for kept in self.events[event.request_id] if isinstance(kept, Pooled | Token)], "I-14"
            if isinstance(event, TERMINAL):
                request = self.live.pop(event.request_id)
                assert request.block_ids == (), "I-10"
                assert event.request_id in self.aborted or not self._was_aborted(event), "I-26"
            self._reached |= {"late"} if isinstance(event, Failed) and "deadline" in event.code else set()
            self._reached |= {"stopped"} if isinstance(event, Finished) and event.stop_token_id is not None else set()
            if isinstance(event, Failed) and event.code is ErrorCode.STEP_FAILED:
                assert event.request_id in self.expected_failures, "I-28"
            self.keep([event])

    def _was_aborted(self, event: Event) -> bool:
        return isinstance(event, Finished) and event.reason is FinishReason.ABORT

    def check_idle(self) -> None:
        load = self.load()
        gauges = (load.num_held_blocks, load.num_running, load.num_waiting, load.num_queued_tokens)
        assert gauges == (0, 0, 0, 0), "I-10, I-31"
        assert load.num_reserved_blocks == 0, "I-31"
        assert load.wait_reason is None, "I-31"
        assert self._scheduler._promised == 0, "I-15"
        assert self._scheduler.reserve_ratio == self.config.scheduler.ratio_init, "I-16"
        assert not self._scheduler.waiting.num_tenants, "nothing to share when idle"
        assert not self.fake._newest, "I-33: residue"
        assert not self.fake._outputs, "I-33: residue"

    def check_answer(self, request_id: str) -> None:
        """Compare what one request got with what it gets alone (I-1)."""
        prompt, params = self.submitted[request_id]
        events = self.events[request_id]
        terminals = [event for event in events if isinstance(event, TERMINAL)]
        assert len(terminals) == 1, "I-19, I-26"
        assert events[-1] is terminals[0], "I-26"
        expected, stopped = answer_of(prompt, params)
        tokens, end = self.tokens(request_id), terminals[0]
        complete = isinstance(end, Finished) and end.reason is not FinishReason.ABORT
        assert tokens == (expected if complete else expected[: len(tokens)]), "I-1"
        self._check_logprobs(request_id, tokens, complete=complete)
        self._check_pooled(request_id, complete=complete)
        if request_id in self.expected_failures:
            assert not complete or self.config.overlap, "I-28"
        if isinstance(end, Finished):
            assert end.usage.prompt_tokens == len(prompt), "I-30"
            assert end.usage.completion_tokens == len(tokens) + (complete and stopped), "I-30"
        if complete:
            assert isinstance(end, Finished)
            assert (end.reason is FinishReason.STOP) == stopped, "I-30"

    def _check_pooled(self, request_id: str, *, complete: bool) -> None:
        sent = [list(event.values) for event in self.events[request_id] if isinstance(event, Pooled)]
        pooling = self.pooling[request_id]
        assert len(sent) <= (pooling is not None), "I-14"
        assert sent or pooling is None or not complete, "I-14"
        for vector in sent:
            assert vector == pytest.approx(pooled_of(self.submitted[request_id][0], str(pooling))), "I-1: pooled"

    def _check_logprobs(self, request_id: str, tokens: list[int], *, complete: bool) -> None:
        prompt, params = self.submitted[request_id]
        sent = [event.logprobs for event in self.events[request_id] if isinstance(event, PromptLogprobs)]
        if params.prompt_logprobs is None:
            assert not sent, "I-14"
        elif complete or tokens:
            assert sent == [prompt_logprobs_of(prompt, params.prompt_logprobs)], "I-14"
        given = [event.logprobs for event in self.events[request_id] if isinstance(event, Token)]
        text = [*prompt, *tokens]
        for i, entry in enumerate(given, len(prompt)):
            expected = None if params.logprobs is None else logprobs_of(text[:i], text[i], params.logprobs)
            assert entry == expected, "I-1: log-probabilities"


def atomic_spans(request: Request) -> tuple[tuple[int, int], ...]:
    return () if request.spans is None else request.spans.atomic
