"""Owns the choice of what the next step computes, and of which requests lose memory for it: one decision, so one long
file. Never changes a request, a block or a queue: a plan is a proposal, and making it twice gives the same one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

from engine.config import ResolvedConfig
from engine.kv_tiers import MoveKind, Tier
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.chunk_policy import ChunkRule, Room
from engine.scheduling.forecast import Forecast
from engine.scheduling.request import Request
from engine.scheduling.request_parts import MemoryLack, TierMatch
from engine.scheduling.reservation import Admission
from engine.scheduling.resources import Resource
from engine.scheduling.step_prediction import Prediction
from engine.scheduling.step_time import StepWork
from engine.scheduling.tier_index import PlannedStore, TierIndex
from engine.scheduling.time_budget import TimeBudget
from engine.scheduling.waiting import WaitingQueue
from engine.step import RowKind

MAX_PASSED = 64
"""Maximum number of requests that do not fit, and of requests that cannot use the rest of the step, that a plan looks
past: testing 2,000 took 4.6 ms of every step."""

MOST_LOADS = 3
"""Times that a request waits for KV of lower tiers. What it loaded may have been evicted before it got a seat, or a
tier may have lost it; then its prompt is computed."""

LONG_CHAIN, LOOK_AGAIN_S = 256, 0.1
"""Blocks of a prompt from which on tiers, and the KV cache while memory does not grow, are looked up no more often than
that: in tiers, 6,250 blocks took 9 ms of every step in which the prompt waited for memory. In the KV cache they take
less, but in `bypass` up to 64 prompts were looked up."""

LOSES_LEAST: dict[str, Callable[[Request], tuple[int, ...]]] = {
    "lifo": lambda request: (-request.arrival_index,),
    "offload": lambda request: (-request.arrival_index,),
    "retract": lambda request: (request.num_output, -request.prompt_len, -request.arrival_index),
}
"""By preempt_policy: the sort key for victims of equal urgency; the first loses its memory. `none` goes with full
reservation, which never runs out."""
ALWAYS_OFFLOADED = {"lifo": False, "offload": True, "retract": False, "none": False}
"""By preempt_policy: whether a victim's KV goes to the host tier even if computing it again is predicted faster."""
# The meaning of each other policy value. A value that is missing here raises an error instead of acting like another.
PREFILL_ALONE = {"mixed": False, "mixed_prefill_first": False, "prefill_first": True, "decode_first": False}
"""By batch_mode: whether steps with prefill carry no decode rows."""
DECODES_ALONE = {"mixed": False, "mixed_prefill_first": False, "prefill_first": False, "decode_first": True}
"""By batch_mode: whether steps with decode rows carry no prefill."""
CHUNKS_AHEAD = {"mixed": False, "mixed_prefill_first": True, "prefill_first": False, "decode_first": False}
"""By batch_mode: whether chunks take a step's tokens before its decode rows do."""
SCORED_APART = {"mixed": False, "dedicated": True}
"""By prompt_logprobs_step: whether steps that score a prompt carry no decode rows."""
MOST_PASSED = {"strict": 1, "bypass": MAX_PASSED}
"""By admission_order: number of requests that do not fit after which a plan admits no more; the last is not
overtaken."""


class DeferReason(StrEnum):
    """Why the first request in the queue was not admitted by a plan."""

    MEMORY = "memory"
    SEATS = "seats"
    TOKENS = "tokens"
    """The step's prefill budget is spent, or a span that must not be cut waits for a later step."""
    PARTIAL = "partial"
    """The maximum number of prompts is partly computed."""
    MODE = "mode"
    """The step carries other rows, because of batch_mode, prefill_fill_ratio or prompt_logprobs_step."""
    PREEMPTION = "preemption"
    """Memory has just run out."""


class PlannedRow(NamedTuple):
    """A decision: compute `num_tokens` positions of `request` from `start`. For a request that is being admitted,
    `prefix_blocks` are the cached blocks it starts from; None for one that already runs.

    A tuple, because a plan makes hundreds: a frozen dataclass takes three times as long.
    """

    request: Request
    kind: RowKind
    start: int
    num_tokens: int
    prefix_blocks: tuple[int, ...] | None = None
    cuts: tuple[int, ...] = ()
    """`chunk_owner: engine`: positions at which the engine cuts the row, which has the step to itself."""


class PlannedLoad(NamedTuple):
    """A decision: have the first `num_blocks` blocks of a waiting request in the KV cache, by loading those that it
    lacks. The request leaves the queue until they came."""

    request: Request
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[PlannedRow, ...]
    preempted: tuple[Request, ...] = ()
    """Requests that release their memory before the rows take theirs."""
    overtaken: tuple[Request, ...] = ()
    """One entry for each time that a waiting request was overtaken because it lacked memory."""
    skipped: tuple[Request, ...] = ()
    """Waiting requests that cannot use the rest of the step. Those behind them may overtake if the step takes them
    whole."""
    deferred: DeferReason | None = None
    """Why the first waiting request is not in this plan."""
    reserved_blocks: int = 0
    """Blocks that are kept free for running requests."""
    loads: tuple[PlannedLoad, ...] = ()
    unloaded: tuple[Request, ...] = ()
    """Requests that stop loading, because running ones need the memory. They wait again."""
    stores: tuple[PlannedStore, ...] = ()
    """Blocks to store in lower tiers, as they are before the rows run."""
    stepped_aside: tuple[Request, ...] = ()
    """Long prompts, partly computed, that let others go first in this step."""

    @property
    def has_moves(self) -> bool:
        """Whether there is something to do even without rows."""
        return bool(self.loads or self.unloaded or self.stores)


@dataclass(frozen=True, slots=True)
class View:
    """The input of a plan. Each mapping is in the order in which it is served."""

    waiting: WaitingQueue
    prefilling: Mapping[str, Request]
    decoding: Mapping[str, Request]
    blocks: BlockManager
    resources: Sequence[Resource]
    """The kinds of things that requests hold besides blocks."""
    promised_blocks: int
    """For `reserve_mode: full`: blocks that admitted requests may still allocate."""
    ratio: float
    now: float
    """Monotonic seconds."""
    prefill_limit: int
    """Maximum prefill tokens in this step: max_prefill_tokens, or less after the executor ran out of memory."""
    last_decode: float
    """When a step last carried decode rows, or when the first decoding request was promoted."""
    num_queued_tokens: int
    """Prompt tokens that are in no step yet."""
    forecast: Forecast | None = None
    """Set with `reserve_mode: learned`, else None."""
    prediction: Prediction | None = None
    """What steps take; set if the engine has targets, else None."""
    tiers: TierIndex | None = None
    """None: there is nothing below the device."""
    loading: Mapping[str, Request] = field(default_factory=dict)
    """Requests that hold blocks which are being loaded, but no seat."""
    coming: Collection[bytes] = ()
    """The digests of those blocks."""


_START = itemgetter(2)  # looked up by C code, because a step may have hundreds of rows


def make_plan(view: View, config: ResolvedConfig) -> Plan:
    """Plan the next step. It is empty only if nothing can run before results arrive. Takes O(rows + requests tested for
    admission)."""
    return _Planner(view, config).plan()


class _Planner:
    """Makes one plan. Its state belongs to this plan alone."""

    def __init__(self, view: View, config: ResolvedConfig) -> None:
        self._view = view
        self._config = config
        self._policy = config.scheduler
        self._block_size = config.block_size
        self._chunks = ChunkRule(config, view.prefill_limit)
        self._allowances = [own for resource in view.resources if (own := resource.allowance()) is not None]
        self._cache_epoch = view.blocks.epoch + sum(resource.epoch for resource in view.resources)
        self._rows: list[PlannedRow] = []
        self._preempted: dict[Request, None] = {}
        self._gone: Counter[int] = Counter()  # by block: how many of its holders are preempted
        self._freed = 0  # blocks that become free with the preempted requests
        self._overtaken: list[Request] = []
        self._deferred: DeferReason | None = None
        self._chunk_ends: dict[str, int] = {}  # prefill rows of this plan
        self._num_partial: Counter[int] = Counter()  # by priority
        self._num_decodes = self._decode_tokens = 0
        self._passed: dict[Request, None] = {}  # requests that did not fit; they may be overtaken `_slack` more times
        self._slack = self._policy.max_overtakes
        self._skipped: dict[Request, None] = {}
        self._stepped_aside: list[Request] = []
        self._admits_short = False  # whether only short prompts are admitted, ahead of long ones
        self._taken: set[int] = set()  # cached blocks that no request held before this plan
        self._tokens_left = config.max_num_batched_tokens
        self._time: TimeBudget | None = None  # None: the step's time is not limited
        self._loads: dict[Request, PlannedLoad] = {}
        self._load_blocks = 0  # blocks that these take
        self._unloaded: list[Request] = []
        self._loaded_now: set[bytes] = set()  # blocks that this plan loads
        # The oldest request that holds memory is never a victim, so that some request always makes progress.
        running = chain(view.decoding.values(), view.prefilling.values())
        self._elder = min(running, key=attrgetter("arrival_index"), default=None)
        self._memory = self._admission()

    def _admission(self) -> Admission:
        view, gone = self._view, self._preempted
        return Admission(
            self._config,
            ratio=view.ratio,
            forecast=view.forecast,
            gone=gone,
            promised_blocks=view.promised_blocks,
            available_blocks=self._available(),
            decoding=_without(gone, view.decoding.values()),
            prefilling=_without(gone, view.prefilling.values()),
        )

    def plan(self) -> Plan:
        decodes, budget = self._compose()
        if decodes:
            self._decode()
        if budget and CHUNKS_AHEAD[self._policy.batch_mode]:
            self._prefill_ahead(budget)
        elif budget:
            self._prefill(budget)
        elif not self._preempted:
            self._defer(DeferReason.MODE)
        if not self._rows:
            self._force_progress()
        if self._preempted:
            self._defer(DeferReason.PREEMPTION)
        return Plan(
            tuple(self._rows),
            tuple(self._preempted),
            tuple(self._overtaken),
            tuple(self._skipped),
            self._deferred,
            self._memory.reserved,
            tuple(self._loads.values()),
            tuple(self._unloaded),
            self._stores(),
            tuple(self._stepped_aside),
        )

    # --- which kinds of rows this step carries --------------------------------------------------------------------

    def _compose(self) -> tuple[bool, int]:
        """Return (whether decode rows run, token budget of prefill)."""
        budget = self._view.prefill_limit
        if not self._view.decoding:
            return False, budget
        decode_first = DECODES_ALONE[self._policy.batch_mode] or self._someone_is_about_to_finish()
        if (decode_first and not self._prompt_starves()) or self._gathers():
            return True, 0
        if (self._view.prefilling or self._view.waiting) and self._prefill_runs_alone():
            starved = self._decoding_starves()
            return (True, 0) if starved else (False, budget)
        return True, budget

    def _decoding_starves(self) -> bool:
        if CHUNKS_AHEAD[self._policy.batch_mode]:  # a row may wait while others run
            decoding = self._view.decoding.values()
            return any(request.num_decode_tokens and self._is_overdue(request) for request in decoding)
        return (self._view.now - self._view.last_decode) * 1000 >= self._policy.decode_starve_ms

    def _is_overdue(self, request: Request) -> bool:
        """Whether a decode row has waited for as long as it may."""
        return (self._view.now - request.waiting_since) * 1000 >= self._policy.decode_starve_ms

    def _prefill_runs_alone(self) -> bool:
        policy = self._policy
        if PREFILL_ALONE[policy.batch_mode]:
            return True
        if not (SCORED_APART[policy.prompt_logprobs_step] or self._chunks.is_cut_by_engine):
            return False  # avoids ordering the queue for nothing
        first = self._first_prompt()
        return self._is_dedicated(first) or self._is_cut_by_engine(first)

    def _first_prompt(self) -> Request:
        return next(chain(self._partial_prompts(), self._view.waiting.in_order(self._view.now)))

    def _is_dedicated(self, request: Request) -> bool:
        return SCORED_APART[self._policy.prompt_logprobs_step] and request.scoring is not None

    def _is_cut_by_engine(self, request: Request) -> bool:
        if not self._chunks.is_cut_by_engine:
            return False
        is_partial = request.request_id in self._view.prefilling
        start = request.scheduled if is_partial else len(self._match_prefix(request)) * self._block_size
        beside_decodes = self._tokens_left - sum(r.num_decode_tokens for r in self._view.decoding.values())
        return len(request.token_ids) - start > min(self._view.prefill_limit, beside_decodes)

    def _someone_is_about_to_finish(self) -> bool:
        few = self._policy.decode_finish_tokens
        return bool(few) and any(r.max_tokens - r.num_output <= few for r in self._view.decoding.values())

    def _prompt_starves(self) -> bool:
        first = next(iter(self._view.prefilling.values()), None)
        since = first.waiting_since if first else self._view.waiting.oldest_since()
        return since is not None and (self._view.now - since) * 1000 >= self._policy.prefill_starve_ms

    def _gathers(self) -> bool:
        """Whether prefill waits until there is enough to fill a step (`prefill_fill_ratio`)."""
        view, policy = self._view, self._policy
        if not policy.prefill_fill_ratio:
            return False
        if view.num_queued_tokens >= policy.prefill_fill_ratio * view.prefill_limit:
            return False
        partial_since = min((r.waiting_since for r in view.prefilling.values()), default=view.now)
        waiting_since = view.waiting.oldest_since()
        waited_ms = 0.0 if waiting_since is None else (view.now - waiting_since) * 1000
        return waited_ms < policy.coalesce_waiting_ms and (
            not view.prefilling or (view.now - partial_since) * 1000 < policy.coalesce_partial_ms
        )

    def _force_progress(self) -> None:
        """Make a plan when the mode's own choice gave no rows: decode, or else make room for the oldest prompt."""
        self._decode()
        awaits_results = any(not r.num_decode_tokens for r in self._view.decoding.values())
        if not self._rows and self._view.prefilling and not awaits_results:
            budget = min(self._view.prefill_limit, self._tokens_left)
            self._make_room_for_elder(budget)
            self._continue_prompts(budget, self._partial_prompts())

    # --- decode rows: memory for all of them first, then the rows -------------------------------------------------

    def _decode(self) -> None:
        """Find victims until the rest fits, and only then build rows, so that a victim never has a row in the same
        step.

        Drafts are only guesses, so all of them are dropped before any request is preempted.
        """
        decoding = list(_without(self._preempted, self._view.decoding.values()))
        counts = self._with_drafts(decoding)
        growth = self._growth(decoding, counts)
        if growth + self._elder_chunk() > self._available():
            counts = [min(count, 1) for count in counts]
            growth = self._growth(decoding, counts)
            self._unload_for(growth + self._elder_chunk())
            growth = self._preempt_for(decoding, growth)
        if self._preempted or self._unloaded:
            decoding = list(_without(self._preempted, decoding))
            counts = [min(request.num_decode_tokens, 1) for request in decoding]
            self._memory = self._admission()
        self._memory.grow_answers(growth)
        kind = RowKind.DECODE  # looked up once: the lookup of an enum's member takes a sixth of a row's time
        self._rows += [
            PlannedRow(request, kind, request.scheduled, count)
            for request, count in zip(decoding, counts, strict=True)
            if count
        ]
        self._num_decodes, self._decode_tokens = len(self._rows), sum(counts)
        self._tokens_left -= self._decode_tokens

    def _preempt_for(self, decoding: list[Request], growth: int) -> int:
        """Preempt requests until the rows of the others fit, and return the blocks that these rows take. Takes O(rows),
        however many are preempted."""
        victims = self._victims(decoding)
        while growth + self._elder_chunk() > self._available():
            victim = next(victims, None)
            assert victim is not None, "memory ran out, but no request can be preempted"
            self._preempt(victim)
            if victim.request_id in self._view.decoding:
                growth -= self._growth([victim], [min(victim.num_decode_tokens, 1)])
        return growth

    def _unload_for(self, growth: int) -> None:
        """Let requests stop loading, the last one first, until so many blocks are available or nobody loads."""
        loading = list(self._view.loading.values())
        if growth > self._available():
            self._drop_loads()
        while loading and growth > self._available():
            self._unload(loading.pop())

    @property
    def _has_taken_back(self) -> bool:
        """Whether somebody loses memory in this plan. Nobody is admitted then: of shared blocks, what becomes free and
        what is held already would be the same."""
        return bool(self._preempted or self._unloaded)

    def _drop_loads(self) -> None:
        """Begin no load in this step."""
        self._loads.clear()
        self._loaded_now.clear()
        self._load_blocks = 0

    def _unload(self, request: Request) -> None:
        assert request.loading is not None
        self._unloaded.append(request)
        self._freed += self._view.blocks.freed_by(request.loading.block_ids, self._gone)

    def _preempt(self, victim: Request) -> None:
        self._preempted[victim] = None
        self._freed += self._view.blocks.freed_by(victim.block_ids, self._gone)

    def _with_drafts(self, decoding: list[Request]) -> list[int]:
        """Return the tokens of each row. If a step has no room for all drafts, the requests that decode longest keep
        theirs."""
        counts = [request.num_decode_tokens for request in decoding]
        if self._policy.state_snapshot_tokens:  # a row ends where its state must be saved
            counts = [
                min(count, self._chunks.to_snapshot(request.scheduled, count))
                for request, count in zip(decoding, counts, strict=True)
            ]
        excess = sum(counts) - self._config.max_drafting_tokens
        for number in reversed(range(len(counts))):
            if excess <= 0:
                break
            dropped = min(excess, max(counts[number] - 1, 0))
            counts[number] -= dropped
            excess -= dropped
        return counts

    def _available(self) -> int:
        """Return the blocks that are available once this plan's victims have released theirs, and its loads have taken
        theirs."""
        return self._view.blocks.num_available + self._freed - self._load_blocks

    def _growth(self, decoding: list[Request], counts: list[int]) -> int:
        """Return the blocks that these rows take together."""
        size = self._block_size
        return sum(
            -(-(request.scheduled + count) // size) - len(request.block_ids)
            for request, count in zip(decoding, counts, strict=True)
            if request.scheduled + count > len(request.block_ids) * size
        )

    def _elder_chunk(self) -> int:
        """Return the blocks kept for the oldest request's prompt, at most one, so that younger answers cannot take the
        last."""
        elder = self._elder
        return min(self._missing(elder, elder.target), 1) if elder and elder.scheduled < elder.target else 0

    def _missing(self, request: Request, num_tokens: int) -> int:
        return max(self._view.blocks.blocks_for(num_tokens) - len(request.block_ids), 0)

    def _victims(self, decoding: list[Request]) -> Iterator[Request]:
        """Yield the requests to preempt, in order: the least urgent first, then by policy. The elder is never among
        them, and prompts only if no answer is left."""
        loses = LOSES_LEAST[self._policy.preempt_policy]
        candidates = [request for request in decoding if request is not self._elder]
        yield from sorted(candidates, key=lambda request: (-request.priority, *loses(request)))
        while prompt := self._youngest_prompt():  # an emergency: prompts hold the memory that the last decode row needs
            yield prompt

    def _youngest_prompt(self) -> Request | None:
        prompts = [r for r in _without(self._preempted, self._view.prefilling.values()) if r is not self._elder]
        return max(prompts, key=lambda request: request.arrival_index, default=None)

    def _make_room_for_elder(self, budget: int) -> None:
        """Prompts hold all memory and none can advance: preempt the youngest until the oldest can."""
        assert self._elder is not None
        self._drop_loads()
        loading = list(self._view.loading.values())
        while not self._next_chunk(self._elder, budget):
            if loading:
                self._unload(loading.pop())
            elif victim := self._youngest_prompt():
                self._preempt(victim)
            else:
                return
            self._memory = self._admission()

    # --- chunks ahead of decode rows (`batch_mode: mixed_prefill_first`) ------------------------------------------

    def _prefill_ahead(self, budget: int) -> None:
        """Let chunks take what they can use of the step's tokens, and leave the rest to decode rows. Memory for all of
        these is set aside before."""
        overdue = sum(self._is_overdue(row.request) for row in self._rows)
        self._tokens_left = self._config.max_num_batched_tokens - overdue
        self._prefill(budget)
        decodes, chunks = self._rows[: self._num_decodes], self._rows[self._num_decodes :]
        decodes = self._that_fit(decodes, self._config.max_num_batched_tokens - sum(row.num_tokens for row in chunks))
        self._rows = decodes + chunks
        self._num_decodes, self._decode_tokens = len(decodes), sum(row.num_tokens for row in decodes)
        self._tokens_left = self._config.max_num_batched_tokens - sum(row.num_tokens for row in self._rows)

    def _that_fit(self, decodes: list[PlannedRow], tokens: int) -> list[PlannedRow]:
        """Return the decode rows for which so many tokens suffice, those that have waited longest. Drafts come after
        other rows' tokens."""
        if sum(row.num_tokens for row in decodes) <= tokens:
            return decodes
        counts: dict[Request, int] = {}
        first = sorted(decodes, key=lambda row: (row.request.waiting_since, row.request.arrival_index))[:tokens]
        spare = tokens - len(first)
        for row in first:
            drafts = min(row.num_tokens - 1, spare)
            counts[row.request], spare = 1 + drafts, spare - drafts
        return [row._replace(num_tokens=counts[row.request]) for row in decodes if row.request in counts]

    # --- prefill rows ---------------------------------------------------------------------------------------------

    def _prefill(self, budget: int) -> None:
        """Continue partly computed prompts, then admit new ones. New ones of more urgent priority go before both."""
        if not (self._view.prefilling or self._view.waiting):
            return  # the usual case
        budget = min(budget, self._tokens_left)
        self._time = self._time_budget()
        partial = self._partial_prompts()
        if partial and not self._has_taken_back and not self._is_aged(partial[0]):
            budget = self._admit(budget, ahead_of=partial[0])
        budget = self._continue_in_turn(budget, partial)
        if not self._has_taken_back:
            self._admit(budget)

    def _time_budget(self) -> TimeBudget | None:
        """Return the time that the decode rows' targets leave for prefill; None if there is no such limit."""
        prediction, least_s = self._view.prediction, self._config.targets.tpot_s
        if prediction is None or least_s == math.inf or not self._rows:
            return None
        usual = any(row.request.tpot_s == least_s for row in self._rows)  # none is shorter
        target_s = least_s if usual else min(row.request.tpot_s for row in self._rows)
        if self._config.overlap:  # requests that stand aside wait for the end of this step, too
            aside = (request.tpot_s for request in self._view.decoding.values() if request.stands_aside)
            target_s = min([target_s, *aside])
        work = _decode_work(self._rows, self._decode_tokens)
        return TimeBudget(prediction, target_s, work, self._lateness)

    def _lateness(self) -> float:
        """Return how long the prompt that has begun first has waited since it came, or else the one that waits for
        longest, as a multiple of its target for the first token; without such a target, of the time after which it goes
        before all others."""
        begun = min(self._view.prefilling.values(), key=attrgetter("arrived"), default=None)
        since = begun.arrived if begun else self._view.waiting.oldest_since()
        patience_s = begun.ttft_s if begun else self._config.targets.ttft_s
        if patience_s == math.inf:
            patience_s = self._policy.priority_age_ms / 1000
        waited_s = 0.0 if since is None else self._view.now - since
        return waited_s / patience_s if patience_s else math.inf

    def _is_aged(self, request: Request) -> bool:
        return (self._view.now - request.waiting_since) * 1000 >= self._policy.priority_age_ms

    def _partial_prompts(self) -> list[Request]:
        """Return the partly computed prompts: first those that have stood still too long, then by urgency, then those
        that do not step aside, then by age, or by time."""
        partial = list(_without(self._preempted, self._view.prefilling.values()))
        partial = sorted(partial, key=lambda request: (not self._is_aged(request), *self._urgency(request)))
        if self._policy.long_prefill_defer_tokens:
            partial.sort(key=lambda r: (not self._is_aged(r), r.priority, self._steps_aside(r)))
        return partial

    def _urgency(self, request: Request) -> tuple[int, ...]:
        """Return what decides between a partly computed prompt and a waiting one: the lowest goes first."""
        return (request.priority,) if request.ttft_s == math.inf else (request.priority, *request.place)

    # A long prompt that is partly computed may step aside for short ones (`long_prefill_defer_tokens`).

    def _is_long(self, remaining: int) -> bool:
        return 0 < self._policy.long_prefill_defer_tokens <= remaining

    def _steps_aside(self, request: Request) -> bool:
        """Whether a partly computed prompt lets others go first: not if it has stepped aside for too long."""
        if not self._is_long(request.target - request.scheduled) or self._is_aged(request):
            return False
        return (self._view.now - request.last_turn) * 1000 < self._policy.long_prefill_defer_ms

    def _continue_in_turn(self, budget: int, partial: list[Request]) -> int:
        """Continue partly computed prompts, and before the first one that steps aside admit short ones; return the
        remaining budget."""
        first = next((i for i, request in enumerate(partial) if self._steps_aside(request)), len(partial))
        budget, later = self._continue_prompts(budget, partial[:first]), partial[first:]
        if later and not self._has_taken_back:
            budget = self._admit_short(budget, later)
        if self._chunk_ends:
            self._stepped_aside += filter(self._steps_aside, later)
        return self._continue_prompts(budget, later)

    def _admit_short(self, budget: int, later: list[Request]) -> int:
        """Admit short prompts ahead of partly computed ones, which count as such; return the remaining budget. Long
        ones that wait are skipped."""
        num_rows, skipped = len(self._rows), dict(self._skipped)
        priorities = [request.priority for request in later]
        self._num_partial.update(priorities)
        self._admits_short = True
        budget = self._admit(budget, ahead_of=later[0])
        self._admits_short = False
        self._num_partial.subtract(priorities)
        if len(self._rows) == num_rows:  # nobody has overtaken those
            self._skipped = skipped
        return budget

    def _continue_prompts(self, budget: int, partial: Iterable[Request]) -> int:
        """Add the next chunks of partly computed prompts, and return the remaining budget."""
        for request in partial:
            count = 0
            if budget > 0 and not (self._num_decodes and self._is_dedicated(request)):
                count = self._next_chunk(request, budget)
            if not count:
                self._num_partial[request.priority] += 1
                self._put_off(request)
                continue
            self._memory.grow_prompt(self._missing(request, request.scheduled + count))
            self._add_chunk(request, request.scheduled, request.target, count)
            budget -= self._chunks.cost(request.scheduled, count)
        return budget

    def _next_chunk(self, request: Request, budget: int) -> int:
        """Return the tokens of a running prompt's next chunk, limited by its own last block and the available blocks.

        A chunk whose end depends on the request alone is not shortened: its end would depend on other requests' memory.
        """
        start, target = request.scheduled, request.target
        count = self._chunk_size(request, start, target, budget)
        room = (len(request.block_ids) + self._memory.available) * self._block_size - start
        if count <= room:
            return count
        return (
            0 if self._chunks.is_whole else self._chunks.outside_spans(request, start, start + room, most=room) - start
        )

    def _add_chunk(
        self, request: Request, start: int, target: int, count: int, prefix: tuple[int, ...] | None = None
    ) -> None:
        end = start + count
        kind = RowKind.LAST if end == target else RowKind.MIDDLE
        self._num_partial[request.priority] += kind is RowKind.MIDDLE
        self._chunk_ends[request.request_id] = end
        self._tokens_left -= count
        if self._time is not None:
            self._time.take(start, count, last=kind is RowKind.LAST)
        cuts = self._chunks.cuts(request, start, target)
        for allowance in self._allowances:
            allowance.take(request, start, end)
        self._rows.append(PlannedRow(request, kind, start, count, prefix, cuts))

    def _chunk_size(self, request: Request, start: int, target: int, budget: int) -> int:
        if self._time is not None:
            least = 0 if self._chunk_ends else self._time.least  # some prompt always advances
            budget = min(budget, max(self._time.most(start, min(budget, target - start)), least))
        room = Room(budget, self._tokens_left, bool(self._chunk_ends), not self._rows)
        count = self._chunks.size(request, start, target, room)
        if self._allowances:
            gone = [victim.request_id for victim in self._preempted]
            for allowance in self._allowances:
                count = allowance.reach(request, start, start + count, gone) - start
        return count

    def _is_kept_from(self, request: Request) -> bool:
        return any(allowance.is_kept_from(request) for allowance in self._allowances)

    def _put_off(self, request: Request) -> None:
        for allowance in self._allowances:
            allowance.put_off(request)

    # --- admission ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, ahead_of: Request | None = None) -> int:
        """Add the first chunks of waiting requests, in order, and return the remaining budget. With `ahead_of`, only of
        those that go ahead of this partly computed prompt."""
        view = self._view
        seats = self._config.max_num_seqs - len(view.decoding) - len(view.prefilling) - self._num_admitted()
        most_passed = MOST_PASSED[self._policy.admission_order]
        for request in self._candidates(ahead_of):
            if len(self._passed) >= most_passed or len(self._skipped) >= MAX_PASSED:
                break
            if seats <= 0 or budget <= 0:
                self._defer(DeferReason.SEATS if seats <= 0 else DeferReason.TOKENS)
                break
            if self._allowances and self._is_kept_from(request):
                self._skipped[request] = None
                continue
            alone = not (view.decoding or view.prefilling or self._rows)
            if not alone and self._lacked_memory_just_now(request):
                if self._pass(request):
                    break
                continue
            prefix = self._match_prefix(request)
            shared = sum(view.blocks.is_held(block) or block in self._taken for block in prefix)
            load = self._load_of(request, len(prefix))
            if load is not None and (view.coming or self._loaded_now):
                shared += self._shared_of(load, len(prefix))
            if not self._memory.fits(request, shared, alone=alone):
                if len(request.block_hashes) > LONG_CHAIN:
                    until = view.now + LOOK_AGAIN_S
                    request.memory_lack = MemoryLack(until, self._memory.available, len(prefix))
                if self._pass(request):
                    break
                continue
            if self._passed and self._slack <= 0:
                break
            if load is not None:
                if len(view.loading) + len(self._loads) >= self._config.max_num_seqs:
                    self._defer(DeferReason.SEATS)
                    break
                self._add_load(load, prefix, shared)
                continue
            start, target = len(prefix) * self._block_size, len(request.token_ids)
            count = self._chunk_size(request, start, target, budget)
            if reason := self._refuses_chunk(request, count, target - start):
                self._defer(reason)
                if not self._may_be_skipped(request, reason):
                    break
                self._skipped[request] = None
                self._put_off(request)
                continue
            self._memory.admit(request, len(prefix) - shared, len(prefix), start + count)
            self._add_chunk(request, start, target, count, prefix)
            self._taken.update(prefix)
            self._overtaken += self._passed
            self._slack -= bool(self._passed)
            budget -= self._chunks.cost(start, count)
            seats -= 1
        return budget

    def _lacked_memory_just_now(self, request: Request) -> bool:
        """Whether a long prompt lacked memory a moment ago, and nothing has changed that may let it fit."""
        lack, view = request.memory_lack, self._view
        if lack is None or view.now >= lack.until or self._memory.available > lack.num_available:
            return False
        following = request.block_hashes[lack.num_cached : lack.num_cached + 1]
        return not any(view.blocks.block_of(digest) is not None or digest in view.coming for digest in following)

    def _pass(self, request: Request) -> bool:
        """Note that a request lacks memory, so that others may pass it. Return whether nobody may, because others lose
        memory for it."""
        self._defer(DeferReason.MEMORY)
        if self._unload_less_urgent(request):
            return True
        self._passed[request] = None
        self._slack = min(self._slack, self._policy.max_overtakes - request.num_overtakes)
        return False

    def _num_admitted(self) -> int:
        return sum(row.prefix_blocks is not None for row in self._rows[self._num_decodes :])

    # --- KV from lower tiers --------------------------------------------------------------------------------------

    def _load_of(self, request: Request, num_matched: int) -> PlannedLoad | None:
        """Return the load with which a waiting request should begin; None if it should be computed from here on."""
        tiers = self._view.tiers
        if tiers is None or self._unloaded or request.num_loads >= MOST_LOADS:
            return None
        reach, sources = self._reach(request, num_matched, tiers)
        if reach <= num_matched:
            return None
        load_s = sum(count * tiers.rates.move_s(MoveKind.LOAD, tier, self._view.now) for tier, count in sources.items())
        if load_s >= self._prefill_s(tiers, num_matched * self._block_size, reach * self._block_size):
            return None
        return PlannedLoad(request, reach)

    def _reach(self, request: Request, num_matched: int, tiers: TierIndex) -> tuple[int, Mapping[Tier, int]]:
        """Return how many of the request's first blocks could be had without computing them, and how many of them are
        in which tier. A long prompt is looked up again after a while only, since what changed is found when it is
        loaded."""
        match, epochs = request.tier_match, (self._cache_epoch, tiers.epoch, num_matched)
        if match is not None and (match.epochs == epochs or self._view.now < match.until):
            return match.reach, match.sources
        blocks, coming = self._view.blocks, self._view.coming
        reach, sources = num_matched, Counter[Tier]()
        for digest in request.block_hashes[num_matched : request.num_reusable // self._block_size]:
            if blocks.block_of(digest) is None and digest not in coming:
                tier = tiers.nearest(digest)
                if tier is None:
                    break
                sources[tier] += 1
            reach += 1
        if reach > num_matched:
            reach = max(self._usable(request, reach), num_matched)
        until = self._view.now + LOOK_AGAIN_S if len(request.block_hashes) > LONG_CHAIN else 0.0
        request.tier_match = TierMatch(epochs, until, reach, sources)  # a memo, not a decision
        return reach, sources

    def _prefill_s(self, tiers: TierIndex, start: int, end: int) -> float:
        """Predict how long the positions [start, end) of a prompt would take to compute."""
        if self._view.prediction is None:
            return tiers.rates.prefill_s(end - start)
        return self._view.prediction.prefill_seconds(start, end, self._view.prefill_limit)

    def _shared_of(self, load: PlannedLoad, num_matched: int) -> int:
        """Return how many blocks of a load are held or being loaded already."""
        blocks, count = self._view.blocks, 0
        for digest in load.request.block_hashes[num_matched : load.num_blocks]:
            block_id = blocks.block_of(digest)
            held = block_id is not None and (blocks.is_held(block_id) or block_id in self._taken)
            count += held or digest in self._view.coming or digest in self._loaded_now
        return count

    def _add_load(self, load: PlannedLoad, prefix: tuple[int, ...], shared: int) -> None:
        blocks, request = self._view.blocks, load.request
        self._loads[request] = load
        self._load_blocks += load.num_blocks - shared
        self._memory.load(load.num_blocks - shared)
        self._taken.update(prefix)
        for digest in request.block_hashes[len(prefix) : load.num_blocks]:
            if (block_id := blocks.block_of(digest)) is None:
                self._loaded_now.add(digest)
            else:
                self._taken.add(block_id)
        self._overtaken += self._passed
        self._slack -= bool(self._passed)

    def _stores(self) -> tuple[PlannedStore, ...]:
        """Return what to store: first what victims lose, where that is worth it, then what was computed longest ago."""
        tiers = self._view.tiers
        if tiers is None:
            return ()
        hasty = [
            digest
            for victim in self._preempted
            if self._is_offloaded(victim, tiers)
            for digest in victim.block_hashes[: victim.num_published]
        ]
        return tiers.stores(self._view.blocks, hasty)

    def _is_offloaded(self, victim: Request, tiers: TierIndex) -> bool:
        """Whether a victim's KV goes to the host tier: always by policy, or where moving it there and back is faster
        than computing it again."""
        if Tier.HOST not in tiers.tiers:
            return False
        if ALWAYS_OFFLOADED[self._policy.preempt_policy]:
            return True
        moves = (tiers.rates.move_s(kind, Tier.HOST, self._view.now) for kind in MoveKind)
        return victim.num_published * sum(moves) < self._prefill_s(tiers, 0, victim.num_published * self._block_size)

    def _unload_less_urgent(self, request: Request) -> bool:
        """Let less urgent requests stop loading for one that lacks memory; return whether any does. It may be admitted
        in the next step."""
        loading = [other for other in self._view.loading.values() if other.priority > request.priority]
        for other in reversed(loading):
            self._unload(other)
        return bool(loading)

    def _candidates(self, ahead_of: Request | None) -> Iterator[Request]:
        for request in self._view.waiting.in_order(self._view.now):
            if ahead_of is not None and not self._goes_ahead(request, ahead_of):
                return
            if request in self._loads:
                continue
            if not (request.request_id in self._chunk_ends or request in self._skipped or request in self._passed):
                yield request

    def _goes_ahead(self, request: Request, partial: Request) -> bool:
        if self._admits_short:
            return request.priority <= partial.priority
        return self._urgency(request) < self._urgency(partial)

    def _refuses_chunk(self, request: Request, count: int, remaining: int) -> DeferReason | None:
        if self._num_decodes and self._is_dedicated(request):
            return DeferReason.MODE
        if count <= 0:
            return DeferReason.TOKENS
        if self._admits_short and self._is_long(remaining):
            return DeferReason.PARTIAL
        most = self._policy.max_partial_prefills
        too_many = bool(most) and count < remaining and self._num_partial[request.priority] >= most
        return DeferReason.PARTIAL if too_many or (self._skipped and count < remaining) else None

    def _may_be_skipped(self, request: Request, reason: DeferReason) -> bool:
        """Whether others may use the rest of the step, which this request cannot use.

        Only prompts that the step takes whole may overtake. None of them is partly computed after the step, so they
        delay neither a place among partial prompts nor the beginning of a later step, and the request waits for nothing
        else. If a prompt could be cut to fit, the rest of the step is less than a block and not worth a search.
        """
        may_be_cut = not (request.spans or self._chunks.is_whole)
        return bool(self._skipped) or reason is not DeferReason.TOKENS or not may_be_cut

    def _defer(self, reason: DeferReason) -> None:
        """Keep the first reason, which belongs to the request whose turn it was."""
        if self._view.waiting or self._preempted:
            self._deferred = self._deferred or reason

    def _match_prefix(self, request: Request) -> tuple[int, ...]:
        """Return the cached blocks to start from. At least one token is always computed, for its logits."""
        epoch, matched = request.prefix_match
        if epoch != self._cache_epoch:
            most = request.num_reusable // self._block_size
            matched = self._view.blocks.match(request.block_hashes[:most])
            matched = matched[: self._usable(request, len(matched))]
            request.prefix_match = (self._cache_epoch, matched)  # a memo, not a decision
        return matched

    def _usable(self, request: Request, num_blocks: int) -> int:
        """Return how many of the matched blocks can be used: they must end outside every span, and every resource must
        have what the request needs to start there."""
        usable = num_blocks
        if request.spans is not None and (cut := request.spans.cut_at(num_blocks * self._block_size)):
            usable = cut[0] // self._block_size
        for resource in self._view.resources:
            usable = resource.usable_prefix(request, usable)
        return usable if usable == num_blocks else self._usable(request, usable)


def _decode_work(rows: Sequence[PlannedRow], tokens: int) -> StepWork:
    """Return the work of decode rows with so many tokens. Positions that drafts attend to are counted as those of their
    row's newest token: the difference is a few in thousands."""
    keys = sum(map(_START, rows)) + tokens
    drafts = tokens - len(rows)
    return StepWork(tokens, tokens, keys, keys + drafts * keys // len(rows), mixed=drafts)


def _without(gone: Collection[Request], requests: Iterable[Request]) -> Iterable[Request]:
    return [request for request in requests if request not in gone] if gone else requests
