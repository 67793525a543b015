"""Owns the choice of what the next step computes, and of who gives up memory for it.
Never changes a request, a block or a queue: a plan is a proposal, and making it twice gives the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from engine.block_manager import BlockManager
from engine.config import ResolvedConfig
from engine.request import Request
from engine.reservation import Admission
from engine.step import RowKind


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A decision: compute `count` positions of `request` from `start`. For a request that is being admitted,
    `prefix_blocks` are the cached blocks it starts from; None for one that already runs."""

    request: Request
    kind: RowKind
    start: int
    count: int
    prefix_blocks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[PlannedRow, ...]
    preempted: tuple[Request, ...] = ()
    """Give their memory back before the rows take theirs."""
    overtaken: tuple[Request, ...] = ()
    """One entry for each time a waiting request was passed by."""


@dataclass(frozen=True, slots=True)
class View:
    """What a plan is made from. Each queue is in the order in which it is served."""

    waiting: Mapping[str, Request]
    prefilling: Mapping[str, Request]
    decoding: Mapping[str, Request]
    blocks: BlockManager
    promised_blocks: int
    """`reserve_mode: full`: blocks that admitted requests may still allocate."""
    ratio: float
    now: float
    """Monotonic seconds."""
    prefill_limit: int
    """Most prefill tokens in this step: max_prefill_tokens, or less after the executor ran out of memory."""
    last_decode: float
    """When a step last carried decode rows, or the first decoding request was promoted."""


def make_plan(view: View, config: ResolvedConfig) -> Plan:
    """The next step. Empty only when nothing is live. O(rows + requests that are tested for admission)."""
    return _Planner(view, config).plan()


class _Planner:
    """One plan in the making. Its state is this plan's own."""

    def __init__(self, view: View, config: ResolvedConfig) -> None:
        self._view = view
        self._config = config
        self._policy = config.scheduler
        self._block_size = config.block_size
        self._rows: list[PlannedRow] = []
        self._preempted: list[Request] = []
        self._overtaken: list[Request] = []
        self._chunk_ends: dict[str, int] = {}  # prefill rows of this plan
        self._num_partial = 0
        running = [*view.decoding.values(), *view.prefilling.values()]
        # The oldest request that holds memory is never a victim, so that somebody always gets on.
        self._elder = min(running, key=lambda request: request.ticket, default=None)
        self._memory = self._admission(view.blocks.num_available)

    def _admission(self, available_blocks: int) -> Admission:
        view = self._view
        return Admission(
            self._config, ratio=view.ratio, promised_blocks=view.promised_blocks, available_blocks=available_blocks
        )

    def plan(self) -> Plan:
        decodes, budget = self._compose()
        if decodes:
            self._decode()
        if budget:
            self._prefill(min(budget, self._config.max_num_batched_tokens - len(self._rows)))
        if not self._rows:
            self._go_on_somehow()
        return Plan(tuple(self._rows), tuple(self._preempted), tuple(self._overtaken))

    # --- which kinds of rows this step carries --------------------------------------------------------------------

    def _compose(self) -> tuple[bool, int]:
        """(whether decode rows run, token budget of prefill)."""
        budget = self._view.prefill_limit
        mode = self._policy.batch_mode
        if not self._view.decoding:
            return False, budget
        if mode == "prefill_first" and (self._view.prefilling or self._view.waiting):
            starved = (self._view.now - self._view.last_decode) * 1000 >= self._policy.decode_starve_ms
            return (True, 0) if starved else (False, budget)
        if (mode == "decode_first" or self._someone_is_about_to_finish()) and not self._prompt_starves():
            return True, 0
        return True, budget

    def _someone_is_about_to_finish(self) -> bool:
        few = self._policy.decode_finish_tokens
        return bool(few) and any(r.max_new - r.num_output <= few for r in self._view.decoding.values())

    def _prompt_starves(self) -> bool:
        oldest = next(chain(self._view.prefilling.values(), self._view.waiting.values()), None)
        return oldest is not None and (self._view.now - oldest.waiting_since) * 1000 >= self._policy.prefill_starve_ms

    def _go_on_somehow(self) -> None:
        """The mode's own choice came to nothing: decode, or else make room for the oldest prompt."""
        self._decode()
        if not self._rows and self._view.prefilling:
            self._make_room_for_elder()
            self._continue_prompts(self._view.prefill_limit)

    # --- decode rows: memory for all of them first, then the rows -------------------------------------------------

    def _decode(self) -> None:
        """Find victims until the rest fits, and only then build rows: a victim never has a row in the same step."""
        decoding = [request for request in self._view.decoding.values() if request not in self._preempted]
        while self._growth(decoding) + self._elder_chunk() > self._available():
            victim = self._choose_victim(decoding)
            assert victim is not None, "memory ran out with nobody to take it from"
            self._preempted.append(victim)
            decoding = [request for request in decoding if request is not victim]
        self._memory = self._admission(self._available())
        self._memory.grow(self._growth(decoding))
        self._rows += [PlannedRow(request, RowKind.DECODE, request.scheduled, 1) for request in decoding]

    def _available(self) -> int:
        """Blocks at hand once this plan's victims have given up theirs."""
        return self._view.blocks.num_available + self._view.blocks.freed_by(r.block_ids for r in self._preempted)

    def _growth(self, decoding: list[Request]) -> int:
        return sum(self._missing(request, request.scheduled + 1) for request in decoding)

    def _elder_chunk(self) -> int:
        """A block for the oldest request's prompt: younger answers must not take the last one from it."""
        elder = self._elder
        return min(self._missing(elder, elder.target), 1) if elder and elder.scheduled < elder.target else 0

    def _missing(self, request: Request, num_tokens: int) -> int:
        return max(-(-num_tokens // self._block_size) - len(request.block_ids), 0)

    def _choose_victim(self, decoding: list[Request]) -> Request | None:
        candidates = [request for request in decoding if request is not self._elder]
        if not candidates:  # an emergency: prompts hold what the last decode row needs
            return self._youngest_prompt()
        if self._policy.preempt_policy == "lifo":
            return max(candidates, key=lambda request: request.ticket)
        return min(candidates, key=lambda request: (request.num_output, -request.prompt_len, -request.ticket))

    def _youngest_prompt(self) -> Request | None:
        prompts = [r for r in self._view.prefilling.values() if r is not self._elder and r not in self._preempted]
        return max(prompts, key=lambda request: request.ticket, default=None)

    def _make_room_for_elder(self) -> None:
        """Prompts hold all memory and none can go on: take it from the youngest until the oldest can."""
        assert self._elder is not None
        while not self._next_chunk(self._elder, self._view.prefill_limit) and (victim := self._youngest_prompt()):
            self._preempted.append(victim)
            self._memory = self._admission(self._available())

    # --- prefill rows ---------------------------------------------------------------------------------------------

    def _prefill(self, budget: int) -> None:
        budget = self._continue_prompts(budget)
        if budget > 0 and not self._preempted:
            self._admit(budget)

    def _continue_prompts(self, budget: int) -> int:
        """Next chunks of prompts that are partly computed, oldest first; return the budget that is left."""
        for request in self._view.prefilling.values():
            if budget <= 0:
                break
            if request in self._preempted:
                continue
            if count := self._next_chunk(request, budget):
                self._memory.grow(self._missing(request, request.scheduled + count))
                self._add_chunk(request, request.scheduled, request.target, count)
                budget -= count
            else:
                self._num_partial += 1
        return budget

    def _next_chunk(self, request: Request, budget: int) -> int:
        """Tokens of a running prompt's next chunk, as far as its own last block and all available ones reach.

        A request-local chunk is not cut short: its end would depend on who else holds memory.
        """
        count = self._chunk_size(request.scheduled, request.target, budget)
        room = (len(request.block_ids) + self._memory.available) * self._block_size - request.scheduled
        if self._policy.chunk_boundary == "request_local":
            return count if count <= room else 0
        return min(count, room)

    def _add_chunk(
        self, request: Request, start: int, target: int, count: int, prefix: tuple[int, ...] | None = None
    ) -> None:
        kind = RowKind.LAST if start + count == target else RowKind.MIDDLE
        self._num_partial += kind is RowKind.MIDDLE
        self._chunk_ends[request.request_id] = start + count
        self._rows.append(PlannedRow(request, kind, start, count, prefix))

    def _chunk_size(self, start: int, target: int, budget: int) -> int:
        """Tokens of the next chunk. 0: not in this step."""
        policy, remaining = self._policy, target - start
        if policy.chunk_boundary == "request_local":
            own = min(remaining, self._local_chunk())
            return own if own <= budget else 0
        count = min(remaining, budget, policy.long_prefill_token_threshold or remaining)
        if count == remaining:
            return count
        align = policy.chunk_align or self._block_size
        aligned = (start + count) // align * align - start
        # A sliver waits for a step with more room, unless it is all the prefill that this step would have.
        return aligned if aligned > 0 else (0 if self._chunk_ends else count)

    def _local_chunk(self) -> int:
        """The longest chunk that a step holds whatever else it carries."""
        beside_decodes = self._config.max_num_batched_tokens - self._config.max_num_seqs
        most = min(self._view.prefill_limit, beside_decodes)
        return min(most, self._policy.long_prefill_token_threshold or most)

    # --- admission ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int) -> None:
        view = self._view
        seats = self._config.max_num_seqs - len(view.decoding) - len(view.prefilling)
        self._memory.expect(view.decoding.values(), view.prefilling.values(), self._chunk_ends)
        passed: list[Request] = []  # requests that did not fit, and may be overtaken `slack` more times
        slack = self._policy.max_overtakes
        taken: set[int] = set()  # cached blocks that nobody held before this plan
        for request in view.waiting.values():
            if budget <= 0 or seats <= 0:
                break
            prefix = self._match_prefix(request)
            shared = sum(view.blocks.is_held(block) or block in taken for block in prefix)
            alone = not (view.decoding or view.prefilling or self._rows)
            if not self._memory.fits(request, shared, alone=alone):
                if self._policy.admission_order == "strict":
                    break
                passed.append(request)
                slack = min(slack, self._policy.max_overtakes - request.num_overtakes)
                continue
            if passed and slack <= 0:
                break
            start, target = len(prefix) * self._block_size, len(request.token_ids)
            count = self._chunk_size(start, target, budget)
            if count <= 0 or (start + count < target and self._too_many_partial()):
                break
            self._memory.admit(request, len(prefix) - shared, len(prefix), start + count)
            self._add_chunk(request, start, target, count, prefix)
            taken.update(prefix)
            self._overtaken += passed
            slack -= bool(passed)
            budget -= count
            seats -= 1

    def _too_many_partial(self) -> bool:
        most = self._policy.max_partial_prefills
        return bool(most) and self._num_partial >= most

    def _match_prefix(self, request: Request) -> tuple[int, ...]:
        """Cached blocks to start from. At least one token is always computed, for its logits."""
        epoch, matched = request.prefix_match
        if epoch != self._view.blocks.epoch:
            most = (len(request.token_ids) - 1) // self._block_size
            matched = self._view.blocks.match(request.block_hashes[:most])
            request.prefix_match = (self._view.blocks.epoch, matched)  # a memo, not a decision
        return matched
