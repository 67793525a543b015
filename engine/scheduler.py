"""Owns the queues, and what executing a plan does to them: admission, growth, preemption, release.
Never chooses: `engine.planner` does, from a view of these queues, and changes nothing."""

from __future__ import annotations

from engine.block_manager import BlockManager
from engine.config import ResolvedConfig
from engine.planner import Plan, PlannedRow, View, make_plan
from engine.request import Request
from engine.reservation import ReserveRatio
from engine.step import RowKind, ScheduledRequest, StepPlan


class Scheduler:
    """Waiting, prefilling and decoding requests over one block manager.

    A request waits, prefills chunk by chunk, decodes, and is released. A preemption gives its memory back and puts it
    among the waiting again, to compute prompt and answer so far once more; nothing is sampled twice.
    """

    def __init__(self, config: ResolvedConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._ratio = ReserveRatio(config.scheduler)
        self._promised = 0  # blocks that admitted requests may still allocate in their lives
        self._next_step_id = 0
        self._waiting_tokens = 0
        self._last_decode = 0.0
        self._prefill_limit = config.max_prefill_tokens
        # Each in the order in which it is served: dicts for O(1) removal in the middle.
        self.waiting: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to prefill. Prefix hits of waiting requests are not known yet and count as work."""
        return self._waiting_tokens + sum(r.target - r.computed for r in self.prefilling.values())

    @property
    def reserve_ratio(self) -> float:
        return self._ratio.value

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Its prompt is hashed here, once, to be looked up while it waits."""
        request.extend_hashes(request.prompt_len, self._blocks.block_size)
        request.waiting_since = now
        self.waiting[request.request_id] = request
        self._waiting_tokens += len(request.token_ids)

    def find(self, request_id: str) -> Request | None:
        for queue in (self.waiting, self.prefilling, self.decoding):
            if request_id in queue:
                return queue[request_id]
        return None

    def plan(self, now: float) -> Plan:
        """The next step, at `now` in monotonic seconds; empty when nothing is live. Changes nothing."""
        view = View(
            waiting=self.waiting,
            prefilling=self.prefilling,
            decoding=self.decoding,
            blocks=self._blocks,
            promised_blocks=self._promised,
            ratio=self._ratio.value,
            now=now,
            prefill_limit=self._prefill_limit,
            last_decode=self._last_decode,
        )
        return make_plan(view, self._config)

    # --- commit: moves requests and takes blocks exactly as planned -----------------------------------------------

    def commit(self, plan: Plan, now: float) -> StepPlan:
        for request in plan.preempted:
            self._preempt(request, now)
        for request in plan.overtaken:
            request.num_overtakes += 1
        for row in plan.rows:
            if row.prefix_blocks is not None:  # all claims first: an allocation below must not evict them
                self._admit(row.request, row.prefix_blocks)
        self._keep_ratio(plan)
        step = StepPlan(self._next_step_id, tuple(self._schedule(row, now) for row in plan.rows))
        self._next_step_id += 1
        return step

    def _keep_ratio(self, plan: Plan) -> None:
        if plan.preempted:
            self._ratio.after_preemption(self.decoding.values())
        else:
            kinds = {row.kind is RowKind.DECODE for row in plan.rows}
            self._ratio.after_step(decoded=True in kinds, prefilled=False in kinds)

    def _admit(self, request: Request, prefix: tuple[int, ...]) -> None:
        del self.waiting[request.request_id]
        self._waiting_tokens -= len(request.token_ids)
        self.prefilling[request.request_id] = request
        self._blocks.claim(prefix)
        request.block_ids = prefix
        request.num_published = len(prefix)
        request.computed = request.scheduled = len(prefix) * self._blocks.block_size
        if not request.was_scheduled:
            request.cached = request.computed
        request.target = len(request.token_ids)
        self._promised += self._still_promised(request)

    def _still_promised(self, request: Request) -> int:
        return self._blocks.blocks_for(request.lifetime_tokens) - len(request.block_ids)

    def _schedule(self, row: PlannedRow, now: float) -> ScheduledRequest:
        request, end = row.request, row.start + row.count
        assert row.start == request.scheduled, f"{request.request_id}: at {request.scheduled}, not {row.start}"
        self._grow(request, end)
        request.scheduled = end
        request.was_scheduled = True
        request.waiting_since = now
        if row.kind is RowKind.DECODE:
            self._last_decode = now
        return ScheduledRequest(
            request_id=request.request_id,
            kind=row.kind,
            start=row.start,
            token_ids=tuple(request.token_ids[row.start : end]),
            block_ids=request.block_ids,
            sampling=None if row.kind is RowKind.MIDDLE else request.next_sampling(),
        )

    def _grow(self, request: Request, num_tokens: int) -> None:
        missing = self._blocks.blocks_for(num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids += self._blocks.allocate(missing)
            self._promised -= missing

    def _preempt(self, request: Request, now: float) -> None:
        """Give everything back and wait again. What it computed stays in the prefix cache until it is evicted."""
        self._leave(request)
        request.computed = request.scheduled = request.target = 0
        request.waiting_since = now
        keys = [other.queue_key for other in self.waiting.values()]
        if self._config.scheduler.requeue == "front":
            request.queue_key = min([*keys, request.ticket]) - 1
        elif self._config.scheduler.requeue == "back":
            request.queue_key = max([*keys, request.ticket]) + 1
        self._waiting_tokens += len(request.token_ids)
        queue = [*self.waiting.values(), request]
        self.waiting = {r.request_id: r for r in sorted(queue, key=lambda r: (r.queue_key, r.ticket))}

    def roll_back(self, plan: Plan) -> None:
        """The executor ran out of memory and computed nothing of this plan: plan it again, with half the prefill.

        The requests keep the blocks that they took, and their seats; only progress is undone. The limit stays until the
        engine is idle: what did not fit once would not fit again.
        """
        for row in plan.rows:
            row.request.scheduled = row.start
        prefill = sum(row.count for row in plan.rows if row.kind is not RowKind.DECODE)
        self._prefill_limit = max(prefill // 2, min(self._blocks.block_size, self._prefill_limit))

    # --- after the step --------------------------------------------------------------------------------------------

    def advance(self, request: Request, end: int, now: float) -> None:
        """Positions below `end` are computed: publish the blocks they fill, and promote a finished prompt."""
        request.computed = end
        num_full = end // self._blocks.block_size
        if num_full > request.num_published:
            request.extend_hashes(end, self._blocks.block_size)
            for i in range(request.num_published, num_full):
                self._blocks.publish(request.block_ids[i], request.block_hashes[i])
            request.num_published = num_full
        if end == request.target:
            if not self.decoding:
                self._last_decode = now
            self.decoding[request.request_id] = self.prefilling.pop(request.request_id)

    def release(self, request: Request) -> None:
        """The one way out, for stop, length, abort and error alike: leave the queues and give everything back."""
        if self.waiting.pop(request.request_id, None) is None:
            self._leave(request)
        else:
            self._waiting_tokens -= len(request.token_ids)
        if not (self.waiting or self.prefilling or self.decoding):
            self._ratio.reset()
            self._prefill_limit = self._config.max_prefill_tokens

    def _leave(self, request: Request) -> None:
        if self.prefilling.pop(request.request_id, None) is None:
            del self.decoding[request.request_id]  # KeyError: released twice
        self._promised -= self._still_promised(request)
        self._blocks.release(request.block_ids)
        request.block_ids = ()
        request.num_published = 0
