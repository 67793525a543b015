"""Owns the queues and the choice of what the next step computes.
Never executes or emits: `plan` has no side effects, and only `commit` moves requests and takes blocks."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.config import ResolvedConfig
from engine.request import Request
from engine.step import RowKind, ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A decision: compute `count` positions of `request` from `start`. For a request that is being admitted,
    `prefix_blocks` are the cached blocks it starts from; None for one that already runs."""

    request: Request
    kind: RowKind
    start: int
    count: int
    prefix_blocks: tuple[int, ...] | None = None


class Scheduler:
    """Mixed steps: a token for every decoding request first, then prefill chunks in arrival order.

    Memory is promised for a request's whole life when it is admitted, so that no running request ever lacks a block
    and nothing is preempted. Admission is strictly in arrival order: the first request that does not fit yet waits,
    and so does everything behind it.
    """

    def __init__(self, config: ResolvedConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self._promised = 0  # blocks that admitted requests may still allocate
        self._next_step_id = 0
        # Insertion order is arrival order in each: dicts for O(1) removal in the middle.
        self.waiting: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.decoding: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: Request) -> None:
        """Queue a request. Its prompt is hashed here, once, to be looked up while it waits."""
        request.extend_hashes(request.prompt_len, self._blocks.block_size)
        self.waiting[request.request_id] = request

    def find(self, request_id: str) -> Request | None:
        for queue in (self.waiting, self.prefilling, self.decoding):
            if request_id in queue:
                return queue[request_id]
        return None

    # --- plan: pure ------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[PlannedRow, ...]:
        """The next step's rows, empty when nothing is live. O(rows), changes nothing."""
        rows = [PlannedRow(r, RowKind.DECODE, r.scheduled, 1) for r in self.decoding.values()]
        budget = min(self._config.max_prefill_tokens, self._config.max_num_batched_tokens - len(rows))
        for request in self.prefilling.values():
            if budget <= 0:
                return tuple(rows)
            rows.append(self._chunk(request, request.scheduled, request.target, budget))
            budget -= rows[-1].count
        self._plan_admissions(rows, budget)
        return tuple(rows)

    def _plan_admissions(self, rows: list[PlannedRow], budget: int) -> None:
        seats = self._config.max_num_seqs - self.num_running
        available = self._blocks.num_available - self._promised
        claimed: set[int] = set()
        for request in self.waiting.values():
            if budget <= 0 or seats <= 0:
                return
            prefix = self._match_prefix(request)
            cost = self._admission_cost(request, prefix, claimed)
            if cost > available:
                return
            cached = len(prefix) * self._blocks.block_size
            rows.append(self._chunk(request, cached, len(request.token_ids), budget, prefix))
            budget -= rows[-1].count
            available -= cost
            seats -= 1
            claimed.update(prefix)

    @staticmethod
    def _chunk(
        request: Request, start: int, target: int, budget: int, prefix: tuple[int, ...] | None = None
    ) -> PlannedRow:
        count = min(target - start, budget)
        kind = RowKind.LAST if start + count == target else RowKind.MIDDLE
        return PlannedRow(request, kind, start, count, prefix)

    def _match_prefix(self, request: Request) -> tuple[int, ...]:
        """Cached blocks to start from. At least one token is always computed, for its logits."""
        epoch, matched = request.prefix_match
        if epoch != self._blocks.epoch:
            most = (len(request.token_ids) - 1) // self._blocks.block_size
            matched = self._blocks.match(request.block_hashes[:most])
            request.prefix_match = (self._blocks.epoch, matched)
        return matched

    def _admission_cost(self, request: Request, prefix: tuple[int, ...], claimed: set[int]) -> int:
        """Available blocks that admission uses up: a whole life's, less those held already or claimed in this plan."""
        shared = sum(self._blocks.is_held(block_id) or block_id in claimed for block_id in prefix)
        return self._blocks.blocks_for(request.lifetime_tokens) - shared

    # --- commit: takes blocks and advances `scheduled` exactly as planned ------------------------------------------

    def commit(self, rows: tuple[PlannedRow, ...]) -> StepPlan:
        for row in rows:
            if row.prefix_blocks is not None:  # all claims first: an allocation below must not evict them
                self._admit(row.request, row.prefix_blocks)
        plan = StepPlan(self._next_step_id, tuple(self._schedule(row) for row in rows))
        self._next_step_id += 1
        return plan

    def _admit(self, request: Request, prefix: tuple[int, ...]) -> None:
        del self.waiting[request.request_id]
        self.prefilling[request.request_id] = request
        self._blocks.claim(prefix)
        request.block_ids = prefix
        request.num_published = len(prefix)
        request.cached = request.computed = request.scheduled = len(prefix) * self._blocks.block_size
        request.target = len(request.token_ids)
        self._promised += self._still_promised(request)

    def _still_promised(self, request: Request) -> int:
        return self._blocks.blocks_for(request.lifetime_tokens) - len(request.block_ids)

    def _schedule(self, row: PlannedRow) -> ScheduledRequest:
        request, end = row.request, row.start + row.count
        assert row.start == request.scheduled, (
            f"{request.request_id}: planned at {row.start}, is at {request.scheduled}"
        )
        self._grow(request, end)
        request.scheduled = end
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

    # --- after the step --------------------------------------------------------------------------------------------

    def advance(self, request: Request, end: int) -> None:
        """Positions below `end` are computed: publish the blocks they fill, and promote a finished prompt."""
        request.computed = end
        request.extend_hashes(end, self._blocks.block_size)
        for i in range(request.num_published, end // self._blocks.block_size):
            self._blocks.publish(request.block_ids[i], request.block_hashes[i])
        request.num_published = end // self._blocks.block_size
        if end == request.target:
            self.decoding[request.request_id] = self.prefilling.pop(request.request_id)

    def release(self, request: Request) -> None:
        """The one way out, for stop, length, abort and error alike: leave the queues and give everything back."""
        if self.waiting.pop(request.request_id, None) is not None:
            return
        if self.prefilling.pop(request.request_id, None) is None:
            del self.decoding[request.request_id]  # KeyError: released twice
        self._promised -= self._still_promised(request)
        self._blocks.release(request.block_ids)
        request.block_ids = ()
